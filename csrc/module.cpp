// Python's door to the native code. What it offers is in bind_*.cpp, one a room; every argument is checked there.
#include <nanobind/nanobind.h>

void bind_cpu(nanobind::module_ &m);
void bind_pack(nanobind::module_ &m);
void bind_mixers(nanobind::module_ &m);
void bind_matmul(nanobind::module_ &m);
void bind_decoder(nanobind::module_ &m);
void bind_lane(nanobind::module_ &m);

NB_MODULE(_native, m) {
    m.doc() = "Native kernels. Arrays come in through DLPack or the buffer protocol; nothing is copied.";
    // What a start leaves is frozen and lives until the process ends (scheduler/loop.py): no leak, and nobody to tell.
    nanobind::set_leak_warnings(false);
    bind_cpu(m);
    bind_pack(m);
    bind_mixers(m);
    bind_matmul(m);
    bind_decoder(m);
    bind_lane(m);
}
