// Captures as Python hands them over, checked: for the doors to the decoder and to the mixers.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <algorithm>
#include <vector>

#include "mixers.h"

namespace ft {

using CaptureArray = nanobind::ndarray<const int64_t, nanobind::ndim<2>, nanobind::c_contig, nanobind::device::cpu>;

// array: [n, 3] of row, tokens, slot, ascending by row, then tokens: core.Capture. Tells the spans which are theirs.
// slots: of the states; where there are none, nothing is kept.
inline std::vector<CaptureOf> read_captures(const CaptureArray &array, std::vector<SpanOf> &spans, int64_t slots) {
    const auto want = [](bool condition, const char *message) {
        if (!condition) throw nanobind::value_error(message);
    };
    want(array.shape(1) == 3, "captures must have three columns");
    if (array.shape(0) == 0 || slots <= 0) return {};
    std::vector<CaptureOf> captures;
    std::vector<int64_t> used;
    for (const SpanOf &span : spans) used.push_back(span.state_slot);
    int64_t last_row = 0, last_tokens = 0;
    for (size_t i = 0; i < array.shape(0); ++i) {
        const int64_t row = array(i, 0), tokens = array(i, 1), slot = array(i, 2);
        want(row >= 0 && row < int64_t(spans.size()), "a capture's row is outside the batch");
        SpanOf &span = spans[row];
        want(tokens >= 1 && tokens <= span.length, "a capture lies outside its sequence's query tokens");
        want(slot >= 0 && slot < slots, "a capture's slot is outside the cache");
        want(row > last_row || (row == last_row && tokens >= last_tokens),
             "captures are not in the order of the batch");
        if (span.captures++ == 0) span.first_capture = i;
        captures.push_back({tokens, slot});
        used.push_back(slot);
        last_row = row;
        last_tokens = tokens;
    }
    std::sort(used.begin(), used.end());
    want(captures.empty() || std::adjacent_find(used.begin(), used.end()) == used.end(),
         "a capture's slot is in use in the same step");
    return captures;
}

}  // namespace ft
