/* stream_read BYTES THREADS: the most bytes a second that THREADS threads read from memory, each a part of an array of
   doubles that it sums up; the best of 12 passes, as in J. McCalpin's STREAM. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>

typedef double Vector __attribute__((vector_size(64)));

static double *numbers;
static size_t each;
static volatile double kept;

static void *fill(void *part) {
    double *mine = numbers + (long)part * each;
    for (size_t i = 0; i < each; ++i) mine[i] = 1.0;
    return NULL;
}
static void *sum(void *part) {
    const Vector *mine = (const Vector *)(numbers + (long)part * each);
    Vector sums[8] = {{0}};
    for (size_t i = 0; i + 8 <= each / 8; i += 8)
        for (int j = 0; j < 8; ++j) sums[j] += mine[i + j];
    for (int j = 1; j < 8; ++j) sums[0] += sums[j];
    kept = sums[0][0];
    return NULL;
}
static double all(void *(*work)(void *), long threads) {
    pthread_t started[threads];
    struct timespec before, after;
    clock_gettime(CLOCK_MONOTONIC, &before);
    for (long i = 0; i < threads; ++i) pthread_create(&started[i], NULL, work, (void *)i);
    for (long i = 0; i < threads; ++i) pthread_join(started[i], NULL);
    clock_gettime(CLOCK_MONOTONIC, &after);
    return (after.tv_sec - before.tv_sec) + (after.tv_nsec - before.tv_nsec) * 1e-9;
}
int main(int count, char **words) {
    if (count != 3) return 2;
    size_t bytes = strtoull(words[1], NULL, 10);
    long threads = atol(words[2]);
    each = bytes / threads / sizeof(Vector) * 8;
    numbers = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (numbers == MAP_FAILED) return 1;
    madvise(numbers, bytes, MADV_HUGEPAGE);
    all(fill, threads);
    double best = 1e9;
    for (int pass = 0; pass < 12; ++pass) {
        double took = all(sum, threads);
        if (took < best) best = took;
    }
    printf("%.0f\n", each * threads * sizeof(double) / best);
    return 0;
}
