// Gated DeltaNet by key heads: a head's channels, states and outputs belong to no other, so that all of a span's work
// on it is one task, from the convolution to the gated norm.
#include <cstring>

#include "mixers.h"

namespace ft {
namespace {

int64_t thread_floats(const DeltaNetDims &dims) { return aligned(delta_floats(dims), 16); }

}  // namespace

int64_t delta_net_scratch(const DeltaNetDims &dims, int threads) { return threads * thread_floats(dims); }

void delta_net(Team &team, const DeltaNetArguments &a) {
    const DeltaNetDims &d = a.dims;
    const MixerKernels &k = a.kernels ? *a.kernels : mixers();
    const int64_t size = activation_bytes(a.type), width = d.value_heads * d.value_dim;
    team.each(a.span_count * d.key_heads, [&](int64_t task) {
        const SpanOf &span = a.spans[task / d.key_heads];
        DeltaHead h{};
        h.dims = d;
        h.head = task % d.key_heads;
        h.length = span.length;
        h.fresh = span.context == 0;
        h.projected = a.projected + span.row * a.stride;
        h.stride = a.stride;
        h.taps = a.taps;
        h.decay_scale = a.decay_scale;
        h.decay_bias = a.decay_bias;
        h.norm = a.norm;
        h.norm_epsilon = a.norm_epsilon;
        h.window = a.window + span.state_slot * d.window_floats();
        h.state = a.state + span.state_slot * d.state_floats();
        h.windows = a.window;
        h.states = a.state;
        h.captures = a.captures + span.first_capture;
        h.capture_count = span.captures;
        h.bf16 = a.type == Activation::bf16;
        h.out = static_cast<char *>(a.out) + span.row * a.out_stride * size;
        h.out_stride = a.out_stride;
        h.scratch = a.scratch + team.index() * thread_floats(d);
        k.delta_net(h);
        if (h.head > 0) return;
        for (int64_t t = 0; t < span.length; ++t)
            std::memset(static_cast<char *>(h.out) + (t * a.out_stride + width) * size, 0,
                        size_t((padded(width) - width) * size));
    });
}

}  // namespace ft
