// Python's door to the decoder: keeps alive what it points to, and checks every argument.

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <string>
#include <utility>

#include "bind_captures.h"
#include "decoder.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace ft {
namespace {

using Bytes = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Blocks = nb::ndarray<const uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Floats = nb::ndarray<const float, nb::c_contig, nb::device::cpu>;
using Integers = nb::ndarray<const int64_t, nb::c_contig, nb::device::cpu>;
using Logits = nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using CacheTensor = nb::ndarray<nb::c_contig, nb::device::cpu>;

[[noreturn]] void refuse(const std::string &message) { throw nb::value_error(message.c_str()); }

void want(bool condition, const char *message) {
    if (!condition) refuse(message);
}

Activation activation_of(const std::string &dtype) {
    if (dtype == "float32") return Activation::f32;
    want(dtype == "bfloat16", "dtype must be float32 or bfloat16");
    return Activation::bf16;
}

Format format_of(int number) {
    want(number >= 0 && number < FORMATS, "there is no such number format");
    return Format(number);
}

bool in_range(const int64_t *values, int64_t count, int64_t low, int64_t high) {
    for (int64_t i = 0; i < count; ++i)
        if (values[i] < low || values[i] >= high) return false;
    return true;
}

// (format, rows, columns, data): PackedMatrix in Python.
using MatrixTuple = nb::tuple;

class DecoderBuilder {
public:
    DecoderBuilder(int64_t hidden, int64_t vocabulary, const std::string &dtype, const Floats &frequencies,
                   float rotary_scale, int64_t slice_bytes)
        : slice_bytes_(slice_bytes) {
        want(slice_bytes > 0, "slice_bytes must be positive");
        want(hidden > 0 && vocabulary > 0, "hidden and vocabulary must be positive");
        model_.hidden = hidden;
        model_.vocabulary = vocabulary;
        model_.type = activation_of(dtype);
        model_.frequencies.assign(frequencies.data(), frequencies.data() + frequencies.size());
        model_.rotary_scale = rotary_scale;
    }

    void ends(const MatrixTuple &embedding, const nb::list &head, const Floats &norm, float epsilon) {
        model_.embedding = matrix(embedding);
        model_.head = linear(head, std::nullopt, model_.vocabulary, model_.hidden);
        model_.norm = norm_of(norm, epsilon, model_.hidden);
        want(model_.embedding.rows == model_.vocabulary && model_.embedding.columns == model_.hidden,
             "the embedding must have the shape [vocabulary, hidden]");
    }

    void attention(const Floats &norm, float epsilon, const nb::list &projection, const std::optional<Floats> &bias,
                   const nb::list &out, const std::optional<Floats> &out_bias, const std::optional<Floats> &head_norm,
                   float head_epsilon, int64_t heads, int64_t kv_heads, int64_t head_dim, bool gated, int64_t window,
                   float scale) {
        want(heads > 0 && kv_heads > 0 && heads % kv_heads == 0, "heads must be a multiple of kv_heads");
        want(head_dim > 0 && int64_t(model_.frequencies.size()) * 2 <= head_dim, "the rotary part exceeds a head");
        want(window >= 0, "window must not be negative");
        DecoderLayer &layer = next(norm, epsilon, Mixer::attention);
        layer.mixer.attention = {heads, kv_heads, head_dim, 2 * int64_t(model_.frequencies.size()), 0, window, gated,
                                 scale};
        const int64_t rows = (heads * (gated ? 2 : 1) + 2 * kv_heads) * head_dim;
        layer.mixer.projection = linear(projection, bias, rows, model_.hidden);
        layer.mixer.out = linear(out, out_bias, model_.hidden, heads * head_dim);
        if (head_norm) layer.mixer.heads = norm_of(*head_norm, head_epsilon, (heads + kv_heads) * head_dim);
    }

    void delta_net(const Floats &norm, float epsilon, const nb::list &projection, const nb::list &out,
                   const Floats &taps, const Floats &decay_scale, const Floats &decay_bias, const Floats &core_norm,
                   float core_epsilon, int64_t key_heads, int64_t value_heads, int64_t key_dim, int64_t value_dim,
                   int64_t kernel) {
        want(key_heads > 0 && value_heads > 0 && value_heads % key_heads == 0,
             "value_heads must be a multiple of key_heads");
        want(key_dim > 0 && value_dim > 0 && kernel > 1, "key_dim and value_dim must be positive, kernel at least 2");
        DecoderLayer &layer = next(norm, epsilon, Mixer::delta_net);
        MixerLayer &mixer = layer.mixer;
        mixer.delta_net = {key_heads, value_heads, key_dim, value_dim, kernel};
        const int64_t channels = mixer.delta_net.channels(), values = value_heads * value_dim;
        mixer.projection = linear(projection, std::nullopt, channels + values + 2 * value_heads, model_.hidden);
        mixer.out = linear(out, std::nullopt, model_.hidden, values);
        mixer.taps = floats(taps, kernel * channels, "taps");
        mixer.decay_scale = floats(decay_scale, value_heads, "decay_scale");
        mixer.decay_bias = floats(decay_bias, value_heads, "decay_bias");
        mixer.core = norm_of(core_norm, core_epsilon, value_dim);
    }

    // Of the layer whose mixer was added last. An ExpertBank comes as (blocks [E, bytes], hidden, intermediate,
    // gate_up format, down format, bias).
    void feed_forward(const Floats &norm, float epsilon, const nb::list &router, int64_t top_k, bool normalize,
                      const std::optional<nb::tuple> &experts, const std::optional<nb::tuple> &shared, bool gated) {
        want(!model_.layers.empty(), "a layer starts with its mixer");
        FeedForward &feed_forward = model_.layers.back().feed_forward;
        model_.layers.back().feed_forward_norm = norm_of(norm, epsilon, model_.hidden);
        want(experts || shared, "a feed-forward needs experts or a shared one");
        if (experts) {
            feed_forward.experts = bank(*experts);
            const int64_t count = feed_forward.experts.experts;
            want(top_k > 0 && top_k <= count, "top_k must be from 1 to the number of experts");
            feed_forward.router = linear(router, std::nullopt, count + (gated ? 1 : 0), model_.hidden);
        }
        if (shared) feed_forward.shared = bank(*shared);
        want(!shared || feed_forward.shared.experts == 1, "the shared expert is a bank of one");
        want(!gated || (experts && shared), "a gate belongs to a shared expert beside routed ones");
        feed_forward.top_k = top_k;
        feed_forward.normalize = normalize;
        feed_forward.gated = gated;
    }

    // Tensors as core.CacheTensors has them: one each for the layers of that kind.
    void use_cache(int64_t page_size, const std::vector<CacheTensor> &keys, const std::vector<CacheTensor> &values,
                   const std::vector<CacheTensor> &windows, const std::vector<CacheTensor> &states) {
        want(page_size > 0, "page_size must be positive");
        DecoderCache cache;
        cache.page_size = page_size;
        cache.type = model_.type;
        int64_t pages = -1, slots = -1;
        size_t attention = 0, recurrent = 0;
        for (const DecoderLayer &layer : model_.layers) {
            const MixerLayer &mixer = layer.mixer;
            if (mixer.kind == Mixer::attention) {
                want(attention < keys.size() && attention < values.size(), "the cache has too few layers of keys");
                const AttentionShape &shape = mixer.attention;
                const std::vector<int64_t> page{page_size, shape.kv_heads, shape.head_dim};
                cache.keys.push_back(cached(keys[attention], model_.type, page, pages));
                cache.values.push_back(cached(values[attention], model_.type, page, pages));
                ++attention;
            } else {
                want(recurrent < windows.size() && recurrent < states.size(), "the cache has too few layers of states");
                const DeltaNetDims &dims = mixer.delta_net;
                const std::vector<int64_t> window{dims.kernel - 1, dims.channels()};
                const std::vector<int64_t> state{dims.value_heads, dims.key_dim, dims.value_dim};
                cache.windows.push_back(
                    static_cast<float *>(cached(windows[recurrent], Activation::f32, window, slots)));
                cache.states.push_back(static_cast<float *>(cached(states[recurrent], Activation::f32, state, slots)));
                ++recurrent;
            }
        }
        cache_ = std::move(cache);
        cache_tensors_ = keys;
        for (const auto *more : {&values, &windows, &states})
            cache_tensors_.insert(cache_tensors_.end(), more->begin(), more->end());
        pages_ = pages < 0 ? INT64_MAX / page_size : pages;
        slots_ = slots;
    }

    void forward(const Integers &ids, const Integers &positions, const std::vector<int64_t> &lengths,
                 const std::vector<int64_t> &contexts, const Integers &page_table, const Integers &slots,
                 const Integers &state_slots, const Integers &wanted, const CaptureArray &captures,
                 const Logits &logits, int threads) {
        DecoderStep step = checked(ids, positions, lengths, contexts, page_table, slots, state_slots, wanted, logits);
        step.captures = read_captures(captures, step.spans, slots_);
        want(threads > 0, "threads must be at least 1");
        if (decoder_ == nullptr) decoder_ = std::make_unique<Decoder>(model_, size_t(slice_bytes_));
        nb::gil_scoped_release release;
        decoder_->forward(step, cache_, threads);
    }

    nb::dict take_times() {
        const char *const names[PARTS] = {"embedding", "norms",   "projections", "attention",
                                          "delta_net", "routing", "experts",     "head"};
        const Times times = decoder_ == nullptr ? Times{} : decoder_->take_times();
        nb::dict found;
        for (int i = 0; i < PARTS; ++i) found[names[i]] = times[i];
        return found;
    }

private:
    DecoderStep checked(const Integers &ids, const Integers &positions, const std::vector<int64_t> &lengths,
                        const std::vector<int64_t> &contexts, const Integers &page_table, const Integers &slots,
                        const Integers &state_slots, const Integers &wanted, const Logits &logits) const {
        want(model_.head.parts.size() > 0 && cache_.page_size > 0, "the decoder has no head or no cache yet");
        DecoderStep step;
        step.tokens = ids.size();
        step.ids = ids.data();
        step.positions = positions.data();
        step.slots = slots.data();
        step.wanted = wanted.data();
        step.wanted_count = wanted.size();
        step.logits = logits.data();
        const size_t sequences = lengths.size();
        want(positions.size() == ids.size() && slots.size() == ids.size(), "ids, positions and slots differ in length");
        want(contexts.size() == sequences && state_slots.size() == sequences && page_table.ndim() == 2 &&
                 page_table.shape(0) == sequences,
             "lengths, contexts, page_table and state_slots differ in the number of sequences");
        want(in_range(step.ids, step.tokens, 0, model_.vocabulary), "a token id is outside the vocabulary");
        want(in_range(step.slots, step.tokens, 0, pages_ * cache_.page_size), "a slot is outside the cache");
        want(in_range(page_table.data(), page_table.size(), 0, pages_), "a page is outside the cache");
        want(in_range(step.wanted, step.wanted_count, 0, step.tokens), "a wanted row is outside the batch");
        want(int64_t(logits.shape(0)) == step.wanted_count && int64_t(logits.shape(1)) == model_.vocabulary,
             "logits must have the shape [wanted, vocabulary]");
        want(cache_.states.empty() || in_range(state_slots.data(), sequences, 0, slots_),
             "a state slot is outside the cache");
        const int64_t columns = page_table.shape(1);
        int64_t row = 0;
        for (size_t i = 0; i < sequences; ++i) {
            want(lengths[i] >= 0 && contexts[i] >= 0 && lengths[i] <= step.tokens - row, "lengths do not fit the ids");
            want(cache_.keys.empty() || contexts[i] + lengths[i] <= columns * cache_.page_size,
                 "the page table is too short");
            step.spans.push_back({row, lengths[i], contexts[i], page_table.data() + i * columns, state_slots.data()[i]});
            row += lengths[i];
        }
        want(row == step.tokens, "lengths do not add up to the number of ids");
        return step;
    }

    DecoderLayer &next(const Floats &norm, float epsilon, Mixer kind) {
        want(decoder_ == nullptr, "the decoder runs already");
        int64_t before = 0;
        for (const DecoderLayer &layer : model_.layers) before += layer.mixer.kind == kind;
        DecoderLayer layer;
        layer.mixer_norm = norm_of(norm, epsilon, model_.hidden);
        layer.mixer.kind = kind;
        layer.mixer.cache_index = before;
        model_.layers.push_back(layer);
        return model_.layers.back();
    }

    Packed matrix(const MatrixTuple &tuple) {
        want(tuple.size() == 4, "a matrix is (format, rows, columns, data)");
        const Packed packed{format_of(nb::cast<int>(tuple[0])), nb::cast<int64_t>(tuple[1]),
                            nb::cast<int64_t>(tuple[2]), nullptr};
        want(packed.rows > 0 && packed.columns > 0 && packed.rows < (1ll << 40) && packed.columns < (1ll << 32),
             "a matrix has an impossible shape");
        Bytes data = nb::cast<Bytes>(tuple[3]);
        want(int64_t(data.size()) == matrix_bytes(packed.format, packed.rows, packed.columns),
             "a packed matrix does not have the size of its shape and format");
        want(reinterpret_cast<uintptr_t>(data.data()) % PANEL_ALIGN == 0, "a packed matrix is not aligned to 64 bytes");
        Packed found = packed;
        found.data = data.data();
        bytes_.push_back(std::move(data));
        return found;
    }

    Linear linear(const nb::list &parts, const std::optional<Floats> &bias, int64_t rows, int64_t columns) {
        Linear found;
        for (nb::handle part : parts) found.parts.push_back(matrix(nb::cast<MatrixTuple>(part)));
        want(!found.parts.empty() && found.rows() == rows, "a projection does not have the rows that its layer needs");
        for (const Packed &part : found.parts)
            want(part.columns == columns, "a projection does not have the columns that its layer needs");
        if (bias) found.bias = floats(*bias, rows, "bias");
        return found;
    }

    const float *floats(const Floats &array, int64_t count, const char *name) {
        if (int64_t(array.size()) != count) refuse(std::string(name) + " does not have " + std::to_string(count) + " values");
        floats_.push_back(array);
        return array.data();
    }

    Norm norm_of(const Floats &weight, float epsilon, int64_t width) { return {floats(weight, width, "a norm"), epsilon}; }

    ExpertBank bank(const nb::tuple &tuple) {
        want(tuple.size() == 6, "an expert bank has six parts");
        Blocks blocks = nb::cast<Blocks>(tuple[0]);
        ExpertBank found;
        found.layout = {nb::cast<int64_t>(tuple[1]), nb::cast<int64_t>(tuple[2]), format_of(nb::cast<int>(tuple[3])),
                        format_of(nb::cast<int>(tuple[4])), nb::cast<bool>(tuple[5])};
        found.experts = blocks.shape(0);
        found.blocks = blocks.data();
        found.stride = blocks.shape(1);
        want(found.layout.hidden == model_.hidden && found.layout.intermediate > 0 && found.experts > 0,
             "an expert bank does not fit the model");
        want(found.stride == found.layout.block_bytes(), "an expert's block does not have the size of its layout");
        want(reinterpret_cast<uintptr_t>(found.blocks) % PANEL_ALIGN == 0, "an expert bank is not aligned");
        blocks_.push_back(std::move(blocks));
        return found;
    }

    void *cached(const CacheTensor &tensor, Activation type, const std::vector<int64_t> &shape, int64_t &count) const {
        const bool typed = type == Activation::f32 ? tensor.dtype() == nb::dtype<float>()
                                                   : tensor.dtype().code == uint8_t(nb::dlpack::dtype_code::Bfloat);
        bool fits = typed && tensor.ndim() == shape.size() + 1;
        for (size_t i = 0; fits && i < shape.size(); ++i) fits = int64_t(tensor.shape(i + 1)) == shape[i];
        fits = fits && (count < 0 || int64_t(tensor.shape(0)) == count);
        want(fits, "a tensor of the cache does not have the dtype or shape that its layer needs");
        count = tensor.shape(0);
        return tensor.data();
    }

    DecoderModel model_;
    int64_t slice_bytes_;
    DecoderCache cache_;
    std::unique_ptr<Decoder> decoder_;
    int64_t pages_ = 0, slots_ = 0;
    std::vector<Bytes> bytes_;  // what the model points to
    std::vector<Blocks> blocks_;
    std::vector<Floats> floats_;
    std::vector<CacheTensor> cache_tensors_;
};

}  // namespace
}  // namespace ft

void bind_decoder(nb::module_ &m) {
    using ft::DecoderBuilder;
    nb::class_<DecoderBuilder>(m, "Decoder", "A decoder over packed weights, which it keeps alive but does not copy.")
        .def(nb::init<int64_t, int64_t, const std::string &, const ft::Floats &, float, int64_t>(), "hidden"_a,
             "vocabulary"_a, "dtype"_a, "frequencies"_a, "rotary_scale"_a, "slice_bytes"_a)
        .def("ends", &DecoderBuilder::ends, "embedding"_a, "head"_a, "norm"_a, "epsilon"_a)
        .def("attention", &DecoderBuilder::attention, nb::kw_only(), "norm"_a, "epsilon"_a, "projection"_a,
             "bias"_a.none(), "out"_a, "out_bias"_a.none(), "head_norm"_a.none(), "head_epsilon"_a, "heads"_a,
             "kv_heads"_a, "head_dim"_a, "gated"_a, "window"_a, "scale"_a)
        .def("delta_net", &DecoderBuilder::delta_net, nb::kw_only(), "norm"_a, "epsilon"_a, "projection"_a, "out"_a,
             "taps"_a, "decay_scale"_a, "decay_bias"_a, "core_norm"_a, "core_epsilon"_a, "key_heads"_a,
             "value_heads"_a, "key_dim"_a, "value_dim"_a, "kernel"_a)
        .def("feed_forward", &DecoderBuilder::feed_forward, nb::kw_only(), "norm"_a, "epsilon"_a, "router"_a,
             "top_k"_a, "normalize"_a, "experts"_a.none(), "shared"_a.none(), "gated"_a)
        .def("use_cache", &DecoderBuilder::use_cache, "page_size"_a, "keys"_a, "values"_a, "windows"_a, "states"_a)
        .def("take_times", &DecoderBuilder::take_times, "Seconds since the last call by part of the step.")
        .def("forward", &DecoderBuilder::forward, "ids"_a.noconvert(), "positions"_a.noconvert(), "lengths"_a,
             "contexts"_a, "page_table"_a.noconvert(), "slots"_a.noconvert(), "state_slots"_a.noconvert(),
             "wanted"_a.noconvert(), "captures"_a.noconvert(), "logits"_a.noconvert(), "threads"_a,
             "Computes the batch, writes its keys, values and states, and fills `logits`.");
}
