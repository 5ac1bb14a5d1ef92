// A step cut into slices, the memory that a slice needs between operations, and the operations in their order.

#include "decoder.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>

#include "block.h"

namespace ft {
namespace {

constexpr int64_t SHORTEST_SLICE = 64;   // tokens, whatever they need
constexpr size_t KEPT_BYTES = 16 << 20;  // what a step of few tokens may hold on to after one of many

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }

int64_t mixed_width(const MixerLayer &mixer) {
    if (mixer.kind == Mixer::attention) return mixer.attention.heads * mixer.attention.head_dim;
    return mixer.delta_net.value_heads * mixer.delta_net.value_dim;
}

// The widest of each kind of rows over all layers.
struct Widths {
    int64_t projected = 1, mixed = 1, router = 1, routes = 1;

    explicit Widths(const DecoderModel &model) {
        for (const DecoderLayer &layer : model.layers) {
            projected = std::max(projected, layer.mixer.projection.rows());
            mixed = std::max(mixed, mixed_width(layer.mixer));
            const FeedForward &feed_forward = layer.feed_forward;
            if (!feed_forward.router.parts.empty()) router = std::max(router, feed_forward.router.rows());
            routes = std::max(routes, feed_forward.top_k);
        }
        projected = aligned(projected, PANEL_ROWS);
        mixed = padded(mixed);
        router = aligned(router, PANEL_ROWS);
    }
};

}  // namespace

int64_t Linear::rows() const {
    int64_t rows = 0;
    for (const Packed &part : parts) rows += part.rows;
    return rows;
}

// Rows [first, first + tokens) of a step, with the spans cut to them.
struct Decoder::Slice {
    int64_t first = 0, tokens = 0;
    std::vector<SpanOf> spans;
    std::vector<CaptureOf> captures;
    std::vector<int64_t> wanted, targets;  // rows of the slice whose logits are wanted, and their rows of the logits

    Slice(const DecoderStep &step, int64_t first_row, int64_t count) : first(first_row), tokens(count) {
        for (const SpanOf &span : step.spans) {
            const int64_t begin = std::max(first, span.row), end = std::min(first + tokens, span.row + span.length);
            if (begin >= end) continue;
            const int64_t before = begin - span.row, first_capture = captures.size();
            for (int64_t i = span.first_capture; i < span.first_capture + span.captures; ++i) {
                const CaptureOf &capture = step.captures[i];
                if (capture.tokens > before && capture.tokens <= end - span.row)
                    captures.push_back({capture.tokens - before, capture.slot});
            }
            spans.push_back({begin - first, end - begin, span.context + before, span.pages, span.state_slot,
                             first_capture, int64_t(captures.size()) - first_capture});
        }
        for (int64_t i = 0; i < step.wanted_count; ++i) {
            const int64_t row = step.wanted[i] - first;
            if (row < 0 || row >= tokens) continue;
            wanted.push_back(row);
            targets.push_back(i);
        }
    }
};

struct Decoder::Buffers {
    Widths widths;
    Block residual, hidden, projected, mixed, cosine, sine, router, ids, weights, zeros, ones, gates, scratch, last,
        logits;
    SortedRoutes routes;

    explicit Buffers(const DecoderModel &model) : widths(model) {}

    std::vector<Block *> all() {
        return {&residual, &hidden, &projected, &mixed, &cosine, &sine,    &router, &ids,
                &weights,  &zeros,  &ones,      &gates, &scratch, &last, &logits};
    }

    // Gives a long prefill's memory back once steps are short again.
    void shrink(int64_t tokens) {
        if (tokens >= SHORTEST_SLICE) return;
        size_t held = routes.size();
        for (const Block *block : all()) held += block->size();
        if (held <= KEPT_BYTES) return;
        for (Block *block : all()) block->release();
        routes.release();
    }
};

Decoder::Decoder(DecoderModel model, size_t slice_bytes)
    : model_(std::move(model)), slice_bytes_(slice_bytes), buffers_(std::make_unique<Buffers>(model_)) {}
Decoder::~Decoder() = default;

// One slice's way through the layers. Made before the team starts, so that nothing inside it can fail.
class Decoder::Run {
public:
    Run(const DecoderModel &model, Buffers &buffers, const DecoderStep &step, const DecoderCache &cache,
        const Slice &slice, int threads, Times &times);

    void operator()(Team &team) const {
        timed(team, Part::embedding, [&] { begin(team); });
        for (const DecoderLayer &layer : model_.layers) {
            timed(team, Part::norms, [&] { normalise(team, layer.mixer_norm, residual_, hidden_, tokens_); });
            mix(team, layer.mixer);
            timed(team, Part::norms, [&] { normalise(team, layer.feed_forward_norm, residual_, hidden_, tokens_); });
            feed_forward(team, layer.feed_forward);
        }
        timed(team, Part::head, [&] { finish(team); });
    }

    static size_t scratch(const DecoderModel &model, int threads);

private:
    void reserve_routes() const;

    // Times `operation` by the first thread's clock.
    template <class F>
    void timed(Team &team, Part part, F &&operation) const {
        if (team.index() != 0) return operation();
        const double start = now();
        operation();
        times_[int(part)] += now() - start;
    }

    void begin(Team &team) const;
    void normalise(Team &team, const Norm &norm, const float *rows, void *out, int64_t count) const;
    void project(Team &team, const Linear &matrices, const Rows &x, int64_t count, float *out, int64_t stride,
                 bool add = false) const;
    void share(MixerArguments &a, const Norm &norm) const;  // what mixers have in common
    void mix(Team &team, const MixerLayer &mixer) const;
    void feed_forward(Team &team, const FeedForward &layer) const;
    void choose_experts(Team &team, const FeedForward &layer) const;
    void add_experts(Team &team, const ExpertBank &bank, int64_t top_k, const int32_t *ids, const float *weights) const;
    void finish(Team &team) const;

    Rows hidden() const { return {model_.type, hidden_, width_}; }

    const DecoderModel &model_;
    const MatmulKernels &kernels_;
    const DecoderStep &step_;
    const DecoderCache &cache_;
    const Slice &slice_;
    const int64_t tokens_, width_;  // width_: of rows of hidden states, in elements
    int64_t projected_stride_, mixed_stride_, router_stride_;
    float *residual_, *projected_, *router_, *weights_, *ones_, *gates_, *cosine_, *sine_, *scratch_, *logits_;
    void *hidden_, *mixed_, *last_;
    Times &times_;
    int32_t *ids_, *zeros_;
    SortedRoutes &routes_;
};

Decoder::Run::Run(const DecoderModel &model, Buffers &buffers, const DecoderStep &step, const DecoderCache &cache,
                  const Slice &slice, int threads, Times &times)
    : model_(model), kernels_(ft::kernels()), step_(step), cache_(cache), slice_(slice), tokens_(slice.tokens),
      width_(padded(model.hidden)), projected_stride_(buffers.widths.projected), mixed_stride_(buffers.widths.mixed),
      router_stride_(buffers.widths.router), times_(times), routes_(buffers.routes) {
    const size_t item = activation_bytes(model.type), half = model.frequencies.size();
    residual_ = buffers.residual.get<float>(tokens_ * model.hidden);
    hidden_ = buffers.hidden.get<char>(tokens_ * width_ * item);
    projected_ = buffers.projected.get<float>(tokens_ * projected_stride_);
    mixed_ = buffers.mixed.get<char>(tokens_ * mixed_stride_ * item);
    cosine_ = buffers.cosine.get<float>(tokens_ * half);
    sine_ = buffers.sine.get<float>(tokens_ * half);
    router_ = buffers.router.get<float>(tokens_ * router_stride_);
    ids_ = buffers.ids.get<int32_t>(tokens_ * buffers.widths.routes);
    weights_ = buffers.weights.get<float>(tokens_ * buffers.widths.routes);
    zeros_ = buffers.zeros.get<int32_t>(tokens_);
    ones_ = buffers.ones.get<float>(tokens_);
    gates_ = buffers.gates.get<float>(tokens_);
    scratch_ = buffers.scratch.get<float>(scratch(model, threads));
    const int64_t wanted = slice.wanted.size();
    last_ = buffers.last.get<char>(wanted * width_ * item);
    reserve_routes();
    std::fill_n(zeros_, tokens_, 0);
    std::fill_n(ones_, tokens_, 1.0f);
    // Consecutive rows of the result are written in place.
    const bool in_place = wanted > 0 && slice.targets.back() - slice.targets.front() == wanted - 1;
    logits_ = in_place ? step.logits + slice.targets.front() * model.vocabulary
                       : buffers.logits.get<float>(wanted * model.vocabulary);
}

void Decoder::Run::reserve_routes() const {
    for (const DecoderLayer &layer : model_.layers) {
        const FeedForward &feed_forward = layer.feed_forward;
        if (feed_forward.experts.experts > 0)
            routes_.reserve(feed_forward.experts, model_.type, tokens_, feed_forward.top_k);
        if (feed_forward.shared.experts > 0) routes_.reserve(feed_forward.shared, model_.type, tokens_, 1);
    }
}

size_t Decoder::Run::scratch(const DecoderModel &model, int threads) {
    int64_t most = 1;
    for (const DecoderLayer &layer : model.layers)
        most = std::max(most, layer.mixer.kind == Mixer::attention ? attention_scratch(layer.mixer.attention, threads)
                                                                   : delta_net_scratch(layer.mixer.delta_net, threads));
    return most;
}

// The residual stream's start, and the rotary tables that all layers share.
void Decoder::Run::begin(Team &team) const {
    const int64_t half = model_.frequencies.size();
    team.each(tokens_, [&](int64_t t) {
        dequantize_row(model_.embedding, step_.ids[slice_.first + t], residual_ + t * model_.hidden);
        const float position = float(step_.positions[slice_.first + t]);
        for (int64_t i = 0; i < half; ++i) {
            const float angle = position * model_.frequencies[i];
            cosine_[t * half + i] = std::cos(angle) * model_.rotary_scale;
            sine_[t * half + i] = std::sin(angle) * model_.rotary_scale;
        }
    });
}

void Decoder::Run::normalise(Team &team, const Norm &norm, const float *rows, void *out, int64_t count) const {
    const size_t row_bytes = width_ * activation_bytes(model_.type);
    team.each(count, [&](int64_t t) {
        rms_norm(rows + t * model_.hidden, norm.weight, norm.epsilon, model_.hidden, model_.type,
                 static_cast<char *>(out) + t * row_bytes);
    });
}

void Decoder::Run::project(Team &team, const Linear &matrices, const Rows &x, int64_t count, float *out,
                           int64_t stride, bool add) const {
    linear(team, kernels_, matrices.parts.data(), int64_t(matrices.parts.size()), x, count, matrices.bias, out, stride,
           add);
}

void Decoder::Run::share(MixerArguments &a, const Norm &norm) const {
    a.spans = slice_.spans.data();
    a.span_count = slice_.spans.size();
    a.tokens = tokens_;
    a.projected = projected_;
    a.stride = projected_stride_;
    a.norm = norm.weight;
    a.norm_epsilon = norm.epsilon;
    a.type = model_.type;
    a.out = mixed_;
    a.out_stride = mixed_stride_;
    a.scratch = scratch_;
}

void Decoder::Run::mix(Team &team, const MixerLayer &mixer) const {
    const int64_t at = mixer.cache_index;
    timed(team, Part::projections,
          [&] { project(team, mixer.projection, hidden(), tokens_, projected_, projected_stride_); });
    if (mixer.kind == Mixer::attention) {
        AttentionArguments a{};
        share(a, mixer.heads);
        a.shape = mixer.attention;
        a.shape.page_size = cache_.page_size;
        a.slots = step_.slots + slice_.first;
        a.cosine = cosine_;
        a.sine = sine_;
        a.cache = cache_.type;
        a.keys = cache_.keys[at];
        a.values = cache_.values[at];
        timed(team, Part::attention, [&] { attention(team, a); });
    } else {
        DeltaNetArguments a{};
        share(a, mixer.core);
        a.dims = mixer.delta_net;
        a.taps = mixer.taps;
        a.decay_scale = mixer.decay_scale;
        a.decay_bias = mixer.decay_bias;
        a.window = cache_.windows[at];
        a.state = cache_.states[at];
        a.captures = slice_.captures.data();
        timed(team, Part::delta_net, [&] { delta_net(team, a); });
    }
    timed(team, Part::projections, [&] {
        project(team, mixer.out, {model_.type, mixed_, mixed_stride_}, tokens_, residual_, model_.hidden, true);
    });
}

void Decoder::Run::feed_forward(Team &team, const FeedForward &layer) const {
    if (!layer.router.parts.empty()) timed(team, Part::routing, [&] { choose_experts(team, layer); });
    timed(team, Part::experts, [&] {
        if (layer.experts.experts > 0) add_experts(team, layer.experts, layer.top_k, ids_, weights_);
        if (layer.shared.experts > 0) add_experts(team, layer.shared, 1, zeros_, layer.gated ? gates_ : ones_);
    });
}

void Decoder::Run::add_experts(Team &team, const ExpertBank &bank, int64_t top_k, const int32_t *ids,
                               const float *weights) const {
    if (team.index() == 0) routes_.sort(bank, hidden(), tokens_, top_k, ids, weights);  // allocates nothing
    team.barrier();
    run_experts(team, kernels_, bank, routes_, residual_, model_.hidden, true);
}

void Decoder::Run::choose_experts(Team &team, const FeedForward &layer) const {
    project(team, layer.router, hidden(), tokens_, router_, router_stride_);
    const int64_t count = layer.experts.experts;
    team.each(tokens_, [&](int64_t t) {
        const float *logits = router_ + t * router_stride_;
        route(logits, count, layer.top_k, layer.normalize, ids_ + t * layer.top_k, weights_ + t * layer.top_k);
        if (layer.gated) gates_[t] = sigmoid(logits[count]);
    });
}

void Decoder::Run::finish(Team &team) const {
    const int64_t count = slice_.wanted.size();
    if (count == 0) return;
    const size_t row_bytes = width_ * activation_bytes(model_.type);
    team.each(count, [&](int64_t i) {
        rms_norm(residual_ + slice_.wanted[i] * model_.hidden, model_.norm.weight, model_.norm.epsilon, model_.hidden,
                 model_.type, static_cast<char *>(last_) + i * row_bytes);
    });
    project(team, model_.head, {model_.type, last_, width_}, count, logits_, model_.vocabulary);
    if (logits_ == step_.logits + slice_.targets.front() * model_.vocabulary) return;
    team.each(count, [&](int64_t i) {
        std::memcpy(step_.logits + slice_.targets[i] * model_.vocabulary, logits_ + i * model_.vocabulary,
                    sizeof(float) * model_.vocabulary);
    });
}

Times Decoder::take_times() {
    const Times taken = times_;
    times_ = {};
    return taken;
}

void Decoder::forward(const DecoderStep &step, const DecoderCache &cache, int threads) {
    const Widths &widths = buffers_->widths;
    const size_t item = activation_bytes(model_.type);
    const size_t token_bytes = 4 * (model_.hidden + widths.projected + widths.router + 2 * widths.routes) +
                               item * (padded(model_.hidden) + widths.mixed) + 8 * model_.frequencies.size();
    const size_t fixed = 4 * Run::scratch(model_, threads);
    int64_t most = step.tokens;
    while (most > SHORTEST_SLICE && most * token_bytes + fixed > slice_bytes_) most = (most + 1) / 2;
    buffers_->shrink(step.tokens);
    for (int64_t first = 0; first < step.tokens; first += most) {
        const Slice slice(step, first, std::min(most, step.tokens - first));
        const Run run(model_, *buffers_, step, cache, slice, threads, times_);
        run_team(threads, [&](Team &team) { run(team); });
    }
}

}  // namespace ft
