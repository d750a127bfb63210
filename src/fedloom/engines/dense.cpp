// Local training of a dense net on one client's samples: layers with ReLU between them, cross-entropy, SGD.
//
// A layer's weights lie row by row, a row for each input [inputs + 1][outputs]; the last row is the bias, the weights of
// an input that is always 1. An input that is zero, as most pixels of a digit are and half of what a ReLU lets through,
// then costs nothing: not on the way up, nor for its weights' gradient, nor, behind a ReLU, for its own.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <type_traits>
#include <vector>

struct Job {  // what is not wanted is null
    int64_t depth;
    const int64_t* widths;   // [depth + 1] of the inputs, of every layer
    const void* inputs;      // [n][widths[0]]
    const int64_t* targets;  // [n]
    int64_t steps;
    const int64_t* samples;  // of all batches, one after the other
    const int64_t* lengths;  // [steps] of the batches
    const double* rates;     // [steps]
    double pull, clip, decay, momentum;
    int64_t nesterov;
    const void *start, *drift;  // flat models
    void *end, *raw;            // flat models: where it ends, and the sum of the gradients before any correction
    double* squares;            // [steps] squared norms of the corrected gradients
};

namespace {

constexpr int64_t BYTES = 64;

template <class T>
struct Vector {
    typedef T type __attribute__((vector_size(BYTES)));
    static constexpr int64_t size = BYTES / sizeof(T);
};

template <class T>
using V = typename Vector<T>::type;

template <class T>
class Matrix {  // rows filled up with zeros to whole vectors
    struct Free {
        void operator()(void* memory) const { std::free(memory); }
    };
    std::unique_ptr<V<T>, Free> memory;

  public:
    int64_t rows = 0, vectors = 0;

    Matrix() = default;
    Matrix(int64_t rows, int64_t columns) : rows(rows), vectors((columns + Vector<T>::size - 1) / Vector<T>::size) {
        memory.reset(static_cast<V<T>*>(std::aligned_alloc(BYTES, rows * vectors * BYTES)));
        if (!memory) throw std::bad_alloc();
        clear(rows);
    }
    explicit operator bool() const { return rows > 0; }
    void clear(int64_t first) { std::memset(memory.get(), 0, first * vectors * BYTES); }
    V<T>* operator[](int64_t row) { return memory.get() + row * vectors; }
    T* at(int64_t row) { return reinterpret_cast<T*>((*this)[row]); }
};

float sum_of(V<float> all) {
    const auto half = __builtin_shufflevector(all, all, 0, 1, 2, 3, 4, 5, 6, 7) +
                      __builtin_shufflevector(all, all, 8, 9, 10, 11, 12, 13, 14, 15);
    const auto few = __builtin_shufflevector(half, half, 0, 1, 2, 3) + __builtin_shufflevector(half, half, 4, 5, 6, 7);
    return (few[0] + few[2]) + (few[1] + few[3]);
}

double sum_of(V<double> all) {
    const auto few = __builtin_shufflevector(all, all, 0, 1, 2, 3) + __builtin_shufflevector(all, all, 4, 5, 6, 7);
    return (few[0] + few[2]) + (few[1] + few[3]);
}

template <class T>
struct Entry {  // an input that is not zero
    int32_t sample;
    T value;
};

template <class T>
struct Layer {
    int64_t inputs, outputs;
    Matrix<T> weights, start, drift, momentum, raw;  // the last four only where they are needed
    Matrix<T> out, delta;                            // [batch][outputs], and the loss's gradient with respect to it
    std::vector<Entry<T>> entries;                   // input by input, each from begins[i] to begins[i + 1]
    std::vector<int64_t> begins;

    const Entry<T>* begin(int64_t i) const { return entries.data() + begins[i]; }
    const Entry<T>* end(int64_t i) const { return entries.data() + begins[i + 1]; }
};

// Between a Linear's weight [outputs][inputs] and bias [outputs], and a layer's rows.
template <class T>
void read(Matrix<T>& rows, const T* flat, int64_t inputs, int64_t outputs) {
    for (int64_t i = 0; i < inputs; i++)
        for (int64_t o = 0; o < outputs; o++) rows.at(i)[o] = flat[o * inputs + i];
    std::copy(flat + inputs * outputs, flat + (inputs + 1) * outputs, rows.at(inputs));
}

template <class T>
void write(Matrix<T>& rows, T* flat, int64_t inputs, int64_t outputs) {
    for (int64_t o = 0; o < outputs; o++)
        for (int64_t i = 0; i < inputs; i++) flat[o * inputs + i] = rows.at(i)[o];
    std::copy(rows.at(inputs), rows.at(inputs) + outputs, flat + inputs * outputs);
}

template <class T>
void forward(Layer<T>& layer, const std::vector<const T*>& inputs, bool last) {
    const int32_t batch = inputs.size();
    layer.entries.resize((layer.inputs + 1) * batch);
    Entry<T>* next = layer.entries.data();
    for (int64_t i = 0; i < layer.inputs; i++) {
        layer.begins[i] = next - layer.entries.data();
        for (int32_t b = 0; b < batch; b++) {
            *next = {b, inputs[b][i]};
            next += next->value != 0;
        }
    }
    layer.begins[layer.inputs] = next - layer.entries.data();
    for (int32_t b = 0; b < batch; b++) *next++ = {b, 1};
    layer.begins[layer.inputs + 1] = next - layer.entries.data();

    const int64_t vectors = layer.out.vectors;
    layer.out.clear(batch);
    for (int64_t i = 0; i <= layer.inputs; i++) {
        const V<T>* w = layer.weights[i];
        for (auto e = layer.begin(i), end = layer.end(i); e < end; e++) {
            V<T>* out = layer.out[e->sample];
            const T value = e->value;
            for (int64_t v = 0; v < vectors; v++) out[v] += value * w[v];
        }
    }
    if (last) return;
    T* out = layer.out.at(0);
    for (int64_t j = 0; j < batch * vectors * Vector<T>::size; j++) out[j] = out[j] <= 0 ? 0 : out[j];  // NaN stays
}

// The sum of the losses, and the gradient of their mean.
template <class T>
double cross_entropy(Layer<T>& layer, int64_t batch, const int64_t* samples, const int64_t* targets) {
    double total = 0;
    for (int64_t b = 0; b < batch; b++) {
        const T* out = layer.out.at(b);
        T* delta = layer.delta.at(b);
        const int64_t right = targets[samples[b]];
        const T top = *std::max_element(out, out + layer.outputs);
        T sum = 0;
        for (int64_t o = 0; o < layer.outputs; o++) sum += delta[o] = std::exp(out[o] - top);
        for (int64_t o = 0; o < layer.outputs; o++) delta[o] = (delta[o] / sum - (o == right)) / batch;
        total += std::log(sum) + top - out[right];
    }
    return total;
}

// The loss's gradient with respect to a layer's inputs, which the ReLU below lets pass where they are not zero.
template <class T>
void backward(Layer<T>& layer, Layer<T>& below, int64_t batch) {
    const int64_t vectors = layer.weights.vectors;
    below.delta.clear(batch);
    for (int64_t i = 0; i < layer.inputs; i++)
        for (auto e = layer.begin(i), end = layer.end(i); e < end; e += 2) {  // sums of one alone wait for each other
            const auto other = e + 1 < end ? e + 1 : e;
            const V<T>*delta = layer.delta[e->sample], *beside = layer.delta[other->sample], *w = layer.weights[i];
            V<T> sums = {}, more = {};
            for (int64_t v = 0; v < vectors; v++) sums += w[v] * delta[v], more += w[v] * beside[v];
            below.delta.at(e->sample)[i] = sum_of(sums);
            below.delta.at(other->sample)[i] = sum_of(more);
        }
}

// Calls f with four vectors at a time, as a constant, and then with one, and where they begin.
template <class F>
void pieces(int64_t vectors, F f) {
    int64_t at = 0;
    for (; at + 4 <= vectors; at += 4) f(std::integral_constant<int, 4>(), at);
    for (; at < vectors; at++) f(std::integral_constant<int, 1>(), at);
}

// Of N vectors of an input's weights: the gradient, and what corrects it.
template <class T, int N>
[[gnu::always_inline]] inline void gradient(V<T>* g, Layer<T>& layer, int64_t i, int64_t at) {
    for (int n = 0; n < N; n++) g[n] = V<T>{};
    for (auto e = layer.begin(i), end = layer.end(i); e < end; e++) {
        const V<T>* delta = layer.delta[e->sample] + at;
        for (int n = 0; n < N; n++) g[n] += e->value * delta[n];
    }
}

template <class T, int N>
[[gnu::always_inline]] inline void correct(V<T>* g, Layer<T>& layer, int64_t i, int64_t at, T pull) {
    for (int n = 0; n < N; n++) {
        if (layer.start) g[n] += pull * (layer.weights[i][at + n] - layer.start[i][at + n]);
        if (layer.drift) g[n] += layer.drift[i][at + n];
    }
}

// Of a layer's corrected gradient.
template <class T>
double squared_norm(Layer<T>& layer, T pull) {
    double total = 0;
    for (int64_t i = 0; i <= layer.inputs; i++) {
        V<T> squares = {};
        pieces(layer.weights.vectors, [&](auto count, int64_t at) {
            V<T> g[count];
            gradient<T, count>(g, layer, i, at);
            correct<T, count>(g, layer, i, at, pull);
            for (int n = 0; n < count; n++) squares += g[n] * g[n];
        });
        total += sum_of(squares);
    }
    return total;
}

// A layer's step, its gradient made shorter by `scale`.
template <class T, bool PLAIN>
void step(Layer<T>& layer, const Job& job, T rate, T scale) {
    const T pull = job.pull, decay = job.decay, momentum = job.momentum;
    for (int64_t i = 0; i <= layer.inputs; i++) {
        if (PLAIN && layer.begin(i) == layer.end(i)) continue;
        pieces(layer.weights.vectors, [&](auto count, int64_t at) {
            V<T> g[count], *w = layer.weights[i] + at;
            gradient<T, count>(g, layer, i, at);
            if (!PLAIN) {
                if (layer.raw)
                    for (int n = 0; n < count; n++) layer.raw[i][at + n] += g[n];
                correct<T, count>(g, layer, i, at, pull);
                for (int n = 0; n < count; n++) g[n] = scale * g[n] + decay * w[n];
                if (layer.momentum)
                    for (int n = 0; n < count; n++) {
                        V<T>& m = layer.momentum[i][at + n];
                        m = momentum * m + g[n];
                        g[n] = job.nesterov ? g[n] + momentum * m : m;
                    }
            }
            for (int n = 0; n < count; n++) w[n] -= rate * g[n];
        });
    }
}

// A whole local training; returns the sum of the losses.
template <class T>
double train(const Job& job) {
    const auto *inputs = static_cast<const T*>(job.inputs), *start = static_cast<const T*>(job.start);
    const auto* drift = static_cast<const T*>(job.drift);
    auto *end = static_cast<T*>(job.end), *raw = static_cast<T*>(job.raw);
    const int64_t most = job.steps ? *std::max_element(job.lengths, job.lengths + job.steps) : 0;
    std::vector<Layer<T>> layers(job.depth);
    int64_t at = 0;
    for (int64_t l = 0; l < job.depth; l++) {
        Layer<T>& layer = layers[l];
        layer.inputs = job.widths[l], layer.outputs = job.widths[l + 1];
        const auto rows = [&] { return Matrix<T>(layer.inputs + 1, layer.outputs); };
        const auto held = [&](const T* flat) {
            Matrix<T> found = rows();
            read(found, flat + at, layer.inputs, layer.outputs);
            return found;
        };
        layer.weights = held(start);
        if (job.pull != 0) layer.start = held(start);
        if (drift) layer.drift = held(drift);
        if (job.momentum != 0) layer.momentum = rows();
        if (raw) layer.raw = rows();
        layer.out = Matrix<T>(most + 1, layer.outputs), layer.delta = Matrix<T>(most + 1, layer.outputs);
        layer.begins.resize(layer.inputs + 2);
        at += (layer.inputs + 1) * layer.outputs;
    }
    const bool plain = job.pull == 0 && !drift && job.clip == 0 && job.decay == 0 && job.momentum == 0 && !raw;
    const int64_t* samples = job.samples;
    std::vector<const T*> seen;
    double total = 0;
    for (int64_t s = 0; s < job.steps; samples += job.lengths[s], s++) {
        const int64_t batch = job.lengths[s];
        const T rate = job.rates[s];
        seen.resize(batch);
        for (int64_t l = 0; l < job.depth; l++) {
            for (int64_t b = 0; b < batch; b++)
                seen[b] = l ? layers[l - 1].out.at(b) : inputs + samples[b] * layers[0].inputs;
            forward(layers[l], seen, l == job.depth - 1);
        }
        total += cross_entropy(layers.back(), batch, samples, job.targets);
        for (int64_t l = job.depth - 1; l > 0; l--) backward(layers[l], layers[l - 1], batch);
        double scale = 1;
        if (job.clip != 0 || job.squares) {
            double squares = 0;
            for (Layer<T>& layer : layers) squares += squared_norm<T>(layer, job.pull);
            if (job.squares) job.squares[s] = squares;
            if (job.clip != 0) scale = job.clip / std::max(std::sqrt(squares), job.clip);
        }
        for (Layer<T>& layer : layers) plain ? step<T, true>(layer, job, rate, 1) : step<T, false>(layer, job, rate, scale);
    }
    at = 0;
    for (Layer<T>& layer : layers) {
        write(layer.weights, end + at, layer.inputs, layer.outputs);
        if (raw) write(layer.raw, raw + at, layer.inputs, layer.outputs);
        at += (layer.inputs + 1) * layer.outputs;
    }
    return total;
}

// As `train`; -1 where memory ran out.
template <class T>
double tried(const Job* job) {
    try {
        return train<T>(*job);
    } catch (const std::bad_alloc&) {
        return -1;
    }
}

}  // namespace

extern "C" double train_float32(const Job* job) { return tried<float>(job); }
extern "C" double train_float64(const Job* job) { return tried<double>(job); }
