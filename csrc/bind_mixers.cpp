// Python's door to the mixers: every argument is checked here, nothing behind it checks again.

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "bind_captures.h"
#include "mixers.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

using Any = nb::ndarray<nb::c_contig, nb::device::cpu>;
using Floats = nb::ndarray<float, nb::c_contig, nb::device::cpu>;
using Indices = nb::ndarray<nb::ro, int64_t, nb::c_contig, nb::device::cpu>;
using Sizes = std::vector<int64_t>;

void want(bool condition, const std::string &sentence) {
    if (!condition) throw nb::value_error(sentence.c_str());
}

template <class Array>
void want_shape(const Array &array, const char *name, const Sizes &shape) {
    bool same = array.ndim() == shape.size();
    for (size_t i = 0; same && i < shape.size(); ++i) same = int64_t(array.shape(i)) == shape[i];
    if (same) return;
    std::string text;
    for (const int64_t extent : shape) text += (text.empty() ? "" : ", ") + std::to_string(extent);
    want(false, std::string(name) + " must have the shape [" + text + "]");
}

template <class Array>
int64_t extent(const Array &array, const char *name, size_t dimensions, size_t which) {
    want(array.ndim() == dimensions, std::string(name) + " must have " + std::to_string(dimensions) + " dimensions");
    return int64_t(array.shape(which));
}

ft::Activation type_of(const Any &array, const char *name) {
    const nb::dlpack::dtype type = array.dtype();
    if (type.lanes == 1 && type.bits == 32 && type.code == uint8_t(nb::dlpack::dtype_code::Float))
        return ft::Activation::f32;
    if (type.lanes == 1 && type.bits == 16 && type.code == uint8_t(nb::dlpack::dtype_code::Bfloat))
        return ft::Activation::bf16;
    throw nb::type_error((std::string(name) + " must be float32 or bfloat16").c_str());
}

const ft::MixerKernels &choose(const std::string &isa) {
    if (isa.empty()) return ft::mixers();
    for (const ft::MixerKernels *kernels : ft::usable_mixers())
        if (isa == kernels->name) return *kernels;
    throw nb::value_error(("this processor cannot execute the version '" + isa + "'").c_str());
}

void want_threads(int threads) { want(threads >= 1, "threads must be at least 1"); }

// Rows of activations [tokens, at least padded(width)].
int64_t output_stride(const Any &out, int64_t tokens, int64_t width) {
    want(extent(out, "out", 2, 0) == tokens, "out must have a row a token");
    const int64_t stride = int64_t(out.shape(1));
    want(stride >= ft::padded(width), "out must have at least " + std::to_string(ft::padded(width)) + " columns");
    return stride;
}

std::vector<ft::SpanOf> read_spans(const Sizes &lengths, const Sizes &contexts, int64_t tokens) {
    want(lengths.size() == contexts.size(), "query_lengths and context_lengths must have the same length");
    std::vector<ft::SpanOf> spans;
    int64_t row = 0;
    for (size_t i = 0; i < lengths.size(); ++i) {
        want(lengths[i] >= 1 && lengths[i] <= tokens, "query_lengths must be at least 1 and sum to the tokens");
        want(contexts[i] >= 0 && contexts[i] < int64_t(1) << 40, "context_lengths must not be negative");
        spans.push_back({row, lengths[i], contexts[i], nullptr, -1});
        row += lengths[i];
    }
    want(row == tokens, "query_lengths must sum to the tokens");
    return spans;
}

void read_pages(std::vector<ft::SpanOf> &spans, const Indices &table, int64_t pages, int64_t page_size) {
    want(extent(table, "page_table", 2, 0) == int64_t(spans.size()), "page_table must have a row a sequence");
    const int64_t width = int64_t(table.shape(1));
    for (size_t i = 0; i < spans.size(); ++i) {
        const int64_t used = (spans[i].context + spans[i].length + page_size - 1) / page_size;
        want(used <= width, "page_table must hold the pages of all tokens");
        spans[i].pages = table.data() + int64_t(i) * width;
        for (int64_t p = 0; p < used; ++p)
            want(spans[i].pages[p] >= 0 && spans[i].pages[p] < pages, "page_table names a page that does not exist");
    }
}

void read_state_slots(std::vector<ft::SpanOf> &spans, const Indices &slots, int64_t count) {
    want_shape(slots, "state_slots", {int64_t(spans.size())});
    Sizes seen(slots.data(), slots.data() + spans.size());
    for (size_t i = 0; i < spans.size(); ++i) spans[i].state_slot = seen[i];
    std::sort(seen.begin(), seen.end());
    want(std::adjacent_find(seen.begin(), seen.end()) == seen.end(), "two sequences share a state slot");
    want(seen.empty() || (seen.front() >= 0 && seen.back() < count), "state_slots names a slot that does not exist");
}

// Of a mixer whose outputs are `width` wide. `a` points into what is handed in.
void take_common(ft::MixerArguments &a, const std::vector<ft::SpanOf> &spans, const Floats &projected, const Any &out,
                 int64_t width, const std::string &isa) {
    a.spans = spans.data();
    a.span_count = int64_t(spans.size());
    a.tokens = int64_t(projected.shape(0));
    a.projected = projected.data();
    a.stride = int64_t(projected.shape(1));
    a.type = type_of(out, "out");
    a.out = out.data();
    a.out_stride = output_stride(out, a.tokens, width);
    a.kernels = &choose(isa);
}

void rms_norm(const Floats &x, const Floats &weight, float epsilon, const Any &out, int threads,
              const std::string &isa) {
    want_threads(threads);
    const int64_t tokens = extent(x, "x", 2, 0), width = extent(x, "x", 2, 1);
    want_shape(weight, "weight", {width});
    const int64_t stride = output_stride(out, tokens, width);
    const ft::Activation type = type_of(out, "out");
    const ft::MixerKernels &k = choose(isa);
    nb::gil_scoped_release release;
    ft::run_team(threads, [&](ft::Team &team) {
        team.each(tokens, [&](int64_t t) {
            char *row = static_cast<char *>(out.data()) + t * stride * ft::activation_bytes(type);
            ft::rms_norm(x.data() + t * width, weight.data(), epsilon, width, type, row, k);
        });
    });
}

void attention(const Floats &projected, const Sizes &lengths, const Sizes &contexts, const Indices &page_table,
               const Indices &slots, const Any &keys, const Any &values, const std::optional<Floats> &norm,
               float epsilon, const Floats &cosine, const Floats &sine, int64_t heads, int64_t window, bool gated,
               float scale, const Any &out, int threads, const std::string &isa) {
    want_threads(threads);
    const int64_t tokens = extent(projected, "projected", 2, 0);
    const int64_t pages = extent(keys, "keys", 4, 0);
    ft::AttentionShape shape{heads, int64_t(keys.shape(2)), int64_t(keys.shape(3)), 0, int64_t(keys.shape(1)),
                             window, gated, scale};
    want(heads >= 1 && shape.kv_heads >= 1 && heads % shape.kv_heads == 0,
         "heads must be a multiple of the cache's key/value heads");
    want(shape.head_dim >= 1 && shape.page_size >= 1, "keys must not be empty");
    want(window >= 0, "window must not be negative");
    want_shape(values, "values", {pages, shape.page_size, shape.kv_heads, shape.head_dim});
    const ft::Activation cache = type_of(keys, "keys");
    if (type_of(values, "values") != cache) throw nb::type_error("keys and values must have the same dtype");
    const int64_t width = ((gated ? 2 : 1) * heads + 2 * shape.kv_heads) * shape.head_dim;
    want(int64_t(projected.shape(1)) >= width, "projected must have at least " + std::to_string(width) + " columns");
    if (norm) want_shape(*norm, "norm", {heads + shape.kv_heads, shape.head_dim});
    shape.rotary_dim = 2 * extent(cosine, "cosine", 2, 1);
    want(shape.rotary_dim <= shape.head_dim, "cosine must not be wider than half a head");
    want_shape(cosine, "cosine", {tokens, shape.rotary_dim / 2});
    want_shape(sine, "sine", {tokens, shape.rotary_dim / 2});
    want_shape(slots, "slots", {tokens});
    for (int64_t t = 0; t < tokens; ++t)
        want(slots.data()[t] >= 0 && slots.data()[t] < pages * shape.page_size, "slots names one that does not exist");
    std::vector<ft::SpanOf> spans = read_spans(lengths, contexts, tokens);
    read_pages(spans, page_table, pages, shape.page_size);

    ft::AttentionArguments a{};
    take_common(a, spans, projected, out, heads * shape.head_dim, isa);
    a.shape = shape;
    a.slots = slots.data();
    a.norm = norm ? norm->data() : nullptr;
    a.norm_epsilon = epsilon;
    a.cosine = cosine.data();
    a.sine = sine.data();
    a.cache = cache;
    a.keys = keys.data();
    a.values = values.data();
    nb::gil_scoped_release release;
    const std::unique_ptr<float[]> scratch(new float[size_t(ft::attention_scratch(shape, threads))]);
    a.scratch = scratch.get();
    ft::run_team(threads, [&](ft::Team &team) { ft::attention(team, a); });
}

void delta_net(const Floats &projected, const Sizes &lengths, const Sizes &contexts, const Indices &state_slots,
               const Floats &taps, const Floats &decay_scale, const Floats &decay_bias, const Floats &norm,
               float epsilon, const Floats &window, const Floats &state, const ft::CaptureArray &captures,
               const Any &out, int threads, const std::string &isa) {
    want_threads(threads);
    const int64_t tokens = extent(projected, "projected", 2, 0), slots = extent(state, "state", 4, 0);
    ft::DeltaNetDims d{0, int64_t(state.shape(1)), int64_t(state.shape(2)), int64_t(state.shape(3)),
                       extent(taps, "taps", 2, 0)};
    want(d.value_heads >= 1 && d.key_dim >= 1 && d.value_dim >= 1 && d.kernel >= 1, "state must not be empty");
    const int64_t channels = int64_t(taps.shape(1)), query_key = channels - d.value_heads * d.value_dim;
    want(query_key > 0 && query_key % (2 * d.key_dim) == 0, "taps must have the channels of queries, keys and values");
    d.key_heads = query_key / (2 * d.key_dim);
    want(d.value_heads % d.key_heads == 0, "state's heads must be a multiple of the key heads that taps has");
    const int64_t width = channels + d.value_heads * (d.value_dim + 2);
    want(int64_t(projected.shape(1)) >= width, "projected must have at least " + std::to_string(width) + " columns");
    want_shape(decay_scale, "decay_scale", {d.value_heads});
    want_shape(decay_bias, "decay_bias", {d.value_heads});
    want_shape(norm, "norm", {d.value_dim});
    want_shape(window, "window", {slots, d.kernel - 1, channels});
    std::vector<ft::SpanOf> spans = read_spans(lengths, contexts, tokens);
    read_state_slots(spans, state_slots, slots);
    const std::vector<ft::CaptureOf> kept = ft::read_captures(captures, spans, slots);

    ft::DeltaNetArguments a{};
    take_common(a, spans, projected, out, d.value_heads * d.value_dim, isa);
    a.dims = d;
    a.taps = taps.data();
    a.decay_scale = decay_scale.data();
    a.decay_bias = decay_bias.data();
    a.norm = norm.data();
    a.norm_epsilon = epsilon;
    a.window = window.data();
    a.state = state.data();
    a.captures = kept.data();
    nb::gil_scoped_release release;
    const std::unique_ptr<float[]> scratch(new float[size_t(ft::delta_net_scratch(d, threads))]);
    a.scratch = scratch.get();
    ft::run_team(threads, [&](ft::Team &team) { ft::delta_net(team, a); });
}

void route(const Floats &logits, bool normalize, const nb::ndarray<int32_t, nb::c_contig, nb::device::cpu> &ids,
           const Floats &weights, int threads, const std::string &isa) {
    want_threads(threads);
    const int64_t tokens = extent(logits, "logits", 2, 0), experts = extent(logits, "logits", 2, 1);
    const int64_t top_k = extent(ids, "ids", 2, 1);
    want(top_k >= 1 && top_k <= experts, "top_k must be at least 1 and at most the number of experts");
    want_shape(ids, "ids", {tokens, top_k});
    want_shape(weights, "weights", {tokens, top_k});
    const ft::MixerKernels &k = choose(isa);
    nb::gil_scoped_release release;
    ft::run_team(threads, [&](ft::Team &team) {
        team.each(tokens, [&](int64_t t) {
            ft::route(logits.data() + t * experts, experts, top_k, normalize, ids.data() + t * top_k,
                      weights.data() + t * top_k, k);
        });
    });
}

std::vector<std::string> versions() {
    std::vector<std::string> names;
    for (const ft::MixerKernels *kernels : ft::usable_mixers()) names.emplace_back(kernels->name);
    return names;
}

}  // namespace

// Shapes and units are in ftengine/kernels/mixers.py. noconvert: a converted copy would take the result with it.
void bind_mixers(nb::module_ &m) {
    m.def("mixer_versions", &versions, "Versions of the mixers usable here, the best first.");
    m.def("rms_norm", &rms_norm, "x"_a.noconvert(), "weight"_a.noconvert(), "epsilon"_a, "out"_a.noconvert(),
          "threads"_a = 1, "isa"_a = "");
    m.def("attention", &attention, "projected"_a.noconvert(), "query_lengths"_a, "context_lengths"_a,
          "page_table"_a.noconvert(), "slots"_a.noconvert(), "keys"_a.noconvert(), "values"_a.noconvert(),
          "norm"_a.noconvert().none(), "epsilon"_a, "cosine"_a.noconvert(), "sine"_a.noconvert(), "heads"_a,
          "window"_a, "gated"_a, "scale"_a, "out"_a.noconvert(), "threads"_a = 1, "isa"_a = "");
    m.def("delta_net", &delta_net, "projected"_a.noconvert(), "query_lengths"_a, "context_lengths"_a,
          "state_slots"_a.noconvert(), "taps"_a.noconvert(), "decay_scale"_a.noconvert(), "decay_bias"_a.noconvert(),
          "norm"_a.noconvert(), "epsilon"_a, "window"_a.noconvert(), "state"_a.noconvert(), "captures"_a.noconvert(),
          "out"_a.noconvert(), "threads"_a = 1, "isa"_a = "");
    m.def("route", &route, "logits"_a.noconvert(), "normalize"_a, "ids"_a.noconvert(), "weights"_a.noconvert(),
          "threads"_a = 1, "isa"_a = "");
}
