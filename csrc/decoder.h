// The whole decoder in one run of a team: embedding, layers, final norm, head. Knows neither Python nor scheduling;
// weights and cache belong to the caller and outlive it.
#pragma once

#include <array>
#include <memory>
#include <vector>

#include "expert_ops.h"
#include "mixers.h"

namespace ft {

// Matrices over the same columns, one below the other.
struct Linear {
    std::vector<Packed> parts;
    const float *bias = nullptr;  // [rows()] or null

    int64_t rows() const;
    int64_t columns() const { return parts.front().columns; }
};

struct Norm {
    const float *weight = nullptr;
    float epsilon = 0;
};

enum class Mixer { attention, delta_net };

// What mixes tokens: `projection` of the normalised residual, attention or Gated DeltaNet, `out` onto the residual.
struct MixerLayer {
    Mixer kind = Mixer::attention;
    int64_t cache_index = 0;  // among the layers of its kind
    Linear projection, out;
    AttentionShape attention{};
    Norm heads;  // attention: over query and key heads, weight may be null
    DeltaNetDims delta_net{};
    const float *taps = nullptr, *decay_scale = nullptr, *decay_bias = nullptr;
    Norm core;  // delta_net: over each value head
};

// Routed experts and one that every token passes; a dense SwiGLU layer is the latter alone.
struct FeedForward {
    Linear router;  // [experts.experts] rows, then one for the shared expert's gate if `gated`; no parts: no routing
    int64_t top_k = 0;
    bool normalize = true;
    ExpertBank experts, shared;  // .experts == 0: there is none
    bool gated = false;          // the shared expert's output is scaled by sigmoid of the router's last row
};

struct DecoderLayer {
    Norm mixer_norm, feed_forward_norm;
    MixerLayer mixer;
    FeedForward feed_forward;
};

struct DecoderModel {
    int64_t hidden = 0, vocabulary = 0;
    Activation type = Activation::f32;
    Packed embedding;
    std::vector<DecoderLayer> layers;
    Norm norm;
    Linear head;
    std::vector<float> frequencies;  // [rotary_dim / 2]
    float rotary_scale = 1;          // of cosine and sine
};

// Tensors of the layers of each kind, by cache_index: mixers.h has their shapes.
struct DecoderCache {
    int64_t page_size = 0;
    Activation type = Activation::f32;
    std::vector<void *> keys, values;
    std::vector<float *> windows, states;
};

// One step of several sequences, packed; core.Batch in Python says more.
struct DecoderStep {
    int64_t tokens = 0;
    const int64_t *ids = nullptr, *positions = nullptr, *slots = nullptr;  // [tokens]
    std::vector<SpanOf> spans;
    std::vector<CaptureOf> captures;
    const int64_t *wanted = nullptr;  // rows whose logits are wanted
    int64_t wanted_count = 0;
    float *logits = nullptr;  // [wanted_count][vocabulary]
};

// What a step's time goes to.
enum class Part { embedding, norms, projections, attention, delta_net, routing, experts, head };
constexpr int PARTS = 8;
using Times = std::array<double, PARTS>;  // seconds by Part

class Decoder {
public:
    // slice_bytes: of what lies between operations; a step that needs more goes through in slices of its tokens.
    Decoder(DecoderModel model, size_t slice_bytes);
    ~Decoder();

    const DecoderModel &model() const { return model_; }

    // Not for several threads at once. Throws std::bad_alloc.
    void forward(const DecoderStep &step, const DecoderCache &cache, int threads);

    // Seconds since the last call, as one thread of the team saw them: its waiting for the others is in them.
    Times take_times();

private:
    struct Slice;    // rows of a step that go through the layers together
    struct Buffers;  // what lies between operations, kept from step to step
    class Run;

    DecoderModel model_;
    size_t slice_bytes_;
    std::unique_ptr<Buffers> buffers_;
    Times times_{};
};

// out[columns] = row `row` of w as float32.
void dequantize_row(const Packed &w, int64_t row, float *out);

}  // namespace ft
