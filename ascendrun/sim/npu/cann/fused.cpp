// The NPU's own operators that ascendrun's programs use, each as the formula it stands for; torch_npu's gradients of
// them stay in use, and call the backward operators here. A wish that the formula does not know is refused, not ignored.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/bernoulli.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/rsqrt.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/softmax.h>
#include <ATen/ops/zeros.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include <limits>
#include <tuple>
#include <vector>

namespace {

using at::Tensor;
using Numbers = at::OptionalIntArrayRef;
using MaybeTensor = std::optional<Tensor>;

// torch_npu's gradients hand on what was not given as an undefined tensor or an empty list.
bool is_given(const MaybeTensor &tensor) { return tensor && tensor->defined(); }
bool is_given(const Numbers &numbers) { return numbers && !numbers->empty(); }

// A kernel of the device computes in the numbers that it chose, whatever autocast is on around it.
struct NoAutocast {
    c10::impl::ExcludeDispatchKeyGuard guard{c10::autocast_dispatch_keyset};
};

// A kernel of the device allocates nothing but its answers. So a formula has copies of its inputs in the memory of the
// host, and only what it answers is put on the device: the allocator there has the peak of the program's own tensors.
template <typename T> const T &on_host(const T &other) { return other; }
Tensor on_host(const Tensor &x) { return x.defined() ? x.to(at::kCPU) : x; }
MaybeTensor on_host(const MaybeTensor &x) { return is_given(x) ? MaybeTensor(on_host(*x)) : x; }

template <typename T> T on_device(T other, at::Device) { return other; }
Tensor on_device(Tensor x, at::Device device) { return x.to(device); }
template <typename... T> std::tuple<T...> on_device(std::tuple<T...> answers, at::Device device) {
    return std::apply([&](const T &...each) { return std::tuple<T...>{on_device(each, device)...}; }, answers);
}

template <auto formula> struct Kernel;
template <typename Answer, typename... Rest, Answer (*formula)(const Tensor &, Rest...)> struct Kernel<formula> {
    static Answer run(const Tensor &first, Rest... rest) {
        NoAutocast here;
        return on_device(formula(on_host(first), on_host(rest)...), first.device());
    }
};

// --- RMSNorm ---

Tensor normed(const Tensor &x, const Tensor &rstd) { return x.to(at::kFloat) * rstd; }

std::tuple<Tensor, Tensor> rms_norm(const Tensor &x, const Tensor &weight, double epsilon) {
    Tensor rstd = at::rsqrt(x.to(at::kFloat).pow(2).mean(-1, true) + epsilon);
    return {normed(x, rstd).to(x.scalar_type()) * weight, rstd};
}

std::tuple<Tensor, Tensor> rms_norm_backward(const Tensor &dy, const Tensor &x, const Tensor &weight, const Tensor &rstd) {
    Tensor unit = normed(x, rstd), grad = dy.to(at::kFloat), scaled = grad * weight.to(at::kFloat);
    Tensor dx = (scaled - unit * (scaled * unit).mean(-1, true)) * rstd;
    return {dx.to(x.scalar_type()), (grad * unit).reshape({-1, weight.numel()}).sum(0).view_as(weight)};
}

// --- rotary positions ---

Tensor turned(const Tensor &x, bool back) {
    auto halves = x.chunk(2, -1);
    return back ? at::cat({halves[1], -halves[0]}, -1) : at::cat({-halves[1], halves[0]}, -1);
}

Tensor rotary(const Tensor &x, const Tensor &cos, const Tensor &sin, c10::string_view mode, const MaybeTensor &rotate) {
    TORCH_CHECK(mode == "half" && !is_given(rotate), "simulated npu_rotary_mul: only rotary_mode half");
    return x * cos + turned(x, false) * sin;
}

Tensor summed_to(const Tensor &grad, const Tensor &like) { return grad.sum_to_size(like.sizes()); }

std::tuple<Tensor, Tensor, Tensor> rotary_backward(const Tensor &dy, const Tensor &x, const Tensor &cos, const Tensor &sin, c10::string_view) {
    return {dy * cos + turned(dy * sin, true), summed_to(dy * x, cos), summed_to(dy * turned(x, false), sin)};
}

// --- SwiGLU ---

Tensor swiglu(const Tensor &x, int64_t dim) {
    auto halves = x.chunk(2, dim);
    return at::silu(halves[0]) * halves[1];
}

Tensor swiglu_backward(const Tensor &dy, const Tensor &x, int64_t dim) {
    auto halves = x.chunk(2, dim);
    Tensor gate = at::sigmoid(halves[0]);
    Tensor d_gate = dy * halves[1] * gate * (1 + halves[0] * (1 - gate));
    return at::cat({d_gate, dy * at::silu(halves[0])}, dim);
}

// --- attention ---
// Layouts BSND, BNSD and TND (samples one after the other, by the cumulative ends of their lengths); sparse modes 0 and 1
// (the mask as given), 2 (causal from the first token), 3 (causal from the last token) and 4 (a band from the last
// token). Modes 2 to 4 need the compressed mask, 2048 x 2048 with ones above the diagonal: without the right one the
// device computes other numbers than asked for, so it is refused here. Without a mask all modes compute everything.

constexpr int64_t kMaskSize = 2048, kMostSamples = 2048;

struct Asked {
    c10::string_view layout;
    MaybeTensor mask;
    double scale, keep;
    int64_t before, after, mode;
    Numbers q_ends, k_ends;
};

struct Span {
    int64_t q_start, q_end, k_start, k_end;
};

struct Attention {
    Tensor query, key, value, weights;  // rows x heads x length x width in float; keys and values once for every query head
};

bool is_packed(const Asked &asked) { return asked.layout == "TND"; }
int64_t heads_of(const Tensor &x, const Asked &asked) { return x.size(asked.layout == "BNSD" || is_packed(asked) ? 1 : 2); }

void check(const Tensor &q, const Tensor &k, int64_t heads, const Asked &asked) {
    TORCH_CHECK(asked.layout == "BSND" || asked.layout == "BNSD" || is_packed(asked),
                "simulated npu_fusion_attention: only input_layout BSND, BNSD and TND");
    TORCH_CHECK(q.dim() == (is_packed(asked) ? 3 : 4), "npu_fusion_attention: input_layout ", asked.layout, " but ", q.dim(), " dimensions");
    TORCH_CHECK(heads == heads_of(q, asked), "npu_fusion_attention: head_num ", heads, " but the query has ", heads_of(q, asked));
    TORCH_CHECK(heads % heads_of(k, asked) == 0, "npu_fusion_attention: ", heads, " heads of queries, ", heads_of(k, asked), " of keys");
    TORCH_CHECK(is_packed(asked) == is_given(asked.q_ends) && is_packed(asked) == is_given(asked.k_ends),
                "npu_fusion_attention: actual_seq_qlen and actual_seq_kvlen belong to input_layout TND, which needs both");
    TORCH_CHECK(asked.mode >= 0 && asked.mode <= 4, "simulated npu_fusion_attention: only sparse_mode 0 to 4");
    if (!is_given(asked.mask)) return;
    TORCH_CHECK(asked.mask->scalar_type() == at::kBool || asked.mask->scalar_type() == at::kByte,
                "npu_fusion_attention: atten_mask is bool or uint8");
    TORCH_CHECK(!is_packed(asked) || asked.mask->dim() == 2, "npu_fusion_attention: atten_mask of TND has two dimensions");
    if (asked.mode < 2) return;
    TORCH_CHECK(asked.mask->sizes() == at::IntArrayRef({kMaskSize, kMaskSize}),
                "npu_fusion_attention: atten_mask of sparse_mode ", asked.mode, " must be 2048 x 2048");
    static const Tensor wanted = at::ones({kMaskSize, kMaskSize}, at::dtype(at::kBool).device(at::kCPU)).triu(1);
    TORCH_CHECK(at::equal(asked.mask->to(at::kBool), wanted),
                "npu_fusion_attention: atten_mask of sparse_mode ", asked.mode, " must be 1 above the diagonal, else 0");
    TORCH_CHECK(asked.mode != 4 || asked.before + asked.after >= 0, "npu_fusion_attention: pre_tockens and next_tockens do not meet");
}

// The samples: of TND the parts between the ends, trailing zeros aside; else one that stands for all rows.
std::vector<Span> spans(const Tensor &q, const Tensor &k, const Asked &asked) {
    if (!is_packed(asked)) return {{0, 0, 0, 0}};
    at::IntArrayRef q_ends = *asked.q_ends, k_ends = *asked.k_ends;
    TORCH_CHECK(q_ends.size() == k_ends.size() && q_ends.size() <= static_cast<size_t>(kMostSamples),
                "npu_fusion_attention: ", q_ends.size(), " and ", k_ends.size(), " samples; expected as many of both, at most 2048");
    std::vector<Span> found;
    int64_t q_start = 0, k_start = 0;
    for (size_t i = 0; i < q_ends.size(); ++i) {
        if (i > 0 && q_ends[i] == 0 && k_ends[i] == 0) break;
        TORCH_CHECK(q_ends[i] >= q_start && k_ends[i] >= k_start && q_ends[i] <= q.size(0) && k_ends[i] <= k.size(0),
                    "npu_fusion_attention: actual_seq_qlen and actual_seq_kvlen must be cumulative and within the tokens");
        if (q_ends[i] > q_start && k_ends[i] > k_start) found.push_back({q_start, q_ends[i], k_start, k_ends[i]});
        q_start = q_ends[i], k_start = k_ends[i];
    }
    return found;
}

Tensor rows_of(const Tensor &x, int64_t start, int64_t end, const Asked &asked) {
    if (is_packed(asked)) return x.slice(0, start, end).transpose(0, 1).unsqueeze(0);
    return asked.layout == "BSND" ? x.transpose(1, 2) : x;
}

void put(Tensor &all, const Tensor &part, int64_t start, int64_t end, const Asked &asked) {
    rows_of(all, start, end, asked).copy_(part);
}

Tensor hidden_of(int64_t length, int64_t seen, const Asked &asked) {
    if (!is_given(asked.mask)) return {};
    if (asked.mode < 2) return is_packed(asked) ? asked.mask->slice(0, 0, length).slice(1, 0, seen).to(at::kBool) : asked.mask->to(at::kBool);
    auto on_host = at::dtype(at::kLong).device(at::kCPU);
    int64_t shift = asked.mode == 2 ? 0 : seen - length;
    Tensor ahead = at::arange(seen, on_host).unsqueeze(0) - at::arange(shift, shift + length, on_host).unsqueeze(1);
    Tensor hidden = ahead.gt(asked.mode == 4 ? asked.after : 0);
    if (asked.mode == 4) hidden = hidden.logical_or(ahead.lt(-asked.before));
    return hidden;
}

Attention attend(const Tensor &q, const Tensor &k, const Tensor &v, const Span &span, const Asked &asked) {
    Tensor query = rows_of(q, span.q_start, span.q_end, asked).to(at::kFloat), key = rows_of(k, span.k_start, span.k_end, asked).to(at::kFloat);
    Tensor value = rows_of(v, span.k_start, span.k_end, asked).to(at::kFloat);
    int64_t shared = query.size(1) / key.size(1);
    Attention made{query, key.repeat_interleave(shared, 1), value.repeat_interleave(shared, 1), {}};
    Tensor scores = at::matmul(made.query, made.key.transpose(-1, -2)) * asked.scale;
    Tensor hidden = hidden_of(query.size(2), key.size(2), asked);
    if (hidden.defined()) scores = scores.masked_fill(hidden, std::numeric_limits<float>::lowest());
    made.weights = at::softmax(scores, -1);
    return made;
}

// Which weights dropout leaves, enlarged by as much as it takes away; forward and backward draw the same from a seed.
Tensor left_over(const Tensor &weights, double keep, int64_t seed) {
    if (keep == 1.0) return at::ones_like(weights);
    at::Generator chance = at::make_generator<at::CPUGeneratorImpl>(static_cast<uint64_t>(seed));
    return at::bernoulli(at::full(weights.sizes(), keep, weights.options()), chance).div_(keep);
}

int64_t drawn_seed(double keep) {
    return keep == 1.0 ? 0 : at::randint(std::numeric_limits<int32_t>::max(), {1}, at::dtype(at::kLong).device(at::kCPU)).item<int64_t>();
}

void refuse_others(const MaybeTensor &pse, const MaybeTensor &padding, Numbers prefix, const MaybeTensor &sink) {
    TORCH_CHECK(!is_given(pse) && !is_given(padding) && !is_given(prefix) && !is_given(sink),
                "simulated npu_fusion_attention: no pse, padding_mask, prefix or sink");
}

std::tuple<Tensor, Tensor, Tensor, Tensor, int64_t, int64_t, int64_t> attention(
    const Tensor &q, const Tensor &k, const Tensor &v, int64_t heads, c10::string_view layout, const MaybeTensor &pse,
    const MaybeTensor &padding, const MaybeTensor &hidden, double scale, double keep, int64_t before, int64_t after, int64_t, Numbers prefix,
    Numbers q_len, Numbers k_len, int64_t sparse_mode, bool, bool, c10::string_view, const MaybeTensor &sink, const MaybeTensor &,
    int64_t, int64_t) {
    refuse_others(pse, padding, prefix, sink);
    Asked asked{layout, hidden, scale, keep, before, after, sparse_mode, q_len, k_len};
    check(q, k, heads, asked);
    int64_t seed = drawn_seed(keep), number = 0;
    Tensor answer = at::zeros(q.sizes(), q.options());
    for (const Span &span : spans(q, k, asked)) {
        Attention made = attend(q, k, v, span, asked);
        put(answer, at::matmul(made.weights * left_over(made.weights, keep, seed + number++), made.value), span.q_start, span.q_end, asked);
    }
    std::vector<int64_t> shape = is_packed(asked) ? std::vector<int64_t>{q.size(0), heads, 8}
                                                  : std::vector<int64_t>{q.size(0), heads, q.size(asked.layout == "BNSD" ? 2 : 1), 8};
    Tensor statistics = at::zeros(shape, q.options().dtype(at::kFloat));
    return {answer, statistics, at::ones_like(statistics), at::empty({0}, q.options()), seed, 0, 0};
}

Tensor per_key_head(const Tensor &grad, int64_t heads) {
    return grad.reshape({grad.size(0), heads, -1, grad.size(2), grad.size(3)}).sum(2);
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> attention_grad(
    const Tensor &q, const Tensor &k, const Tensor &v, const Tensor &dy, int64_t heads, c10::string_view layout, const MaybeTensor &pse,
    const MaybeTensor &padding, const MaybeTensor &hidden, const MaybeTensor &, const MaybeTensor &, const MaybeTensor &,
    const MaybeTensor &, double scale, double keep, int64_t before, int64_t after, int64_t, int64_t seed, int64_t, int64_t, Numbers prefix,
    Numbers q_len, Numbers k_len, int64_t sparse_mode, bool, bool, c10::string_view, const MaybeTensor &sink) {
    refuse_others(pse, padding, prefix, sink);
    Asked asked{layout, hidden, scale, keep, before, after, sparse_mode, q_len, k_len};
    check(q, k, heads, asked);
    Tensor dq = at::zeros(q.sizes(), q.options()), dk = at::zeros(k.sizes(), k.options()), dv = at::zeros(v.sizes(), v.options());
    int64_t number = 0;
    for (const Span &span : spans(q, k, asked)) {
        Attention made = attend(q, k, v, span, asked);
        Tensor grad = rows_of(dy, span.q_start, span.q_end, asked).to(at::kFloat), left = left_over(made.weights, keep, seed + number++);
        Tensor d_weights = at::matmul(grad, made.value.transpose(-1, -2)) * left;
        Tensor d_scores = made.weights * (d_weights - (d_weights * made.weights).sum(-1, true)) * scale;
        put(dq, at::matmul(d_scores, made.key), span.q_start, span.q_end, asked);
        put(dk, per_key_head(at::matmul(d_scores.transpose(-1, -2), made.query), heads_of(k, asked)), span.k_start, span.k_end, asked);
        put(dv, per_key_head(at::matmul((made.weights * left).transpose(-1, -2), grad), heads_of(v, asked)), span.k_start, span.k_end, asked);
    }
    Tensor none = at::empty({0}, q.options());
    return {dq, dk, dv, none, none};
}

// --- AdamW over flat buffers, as NpuFusedAdamW calls it: weights, first and second moments are written in place ---

std::tuple<Tensor, Tensor, Tensor> adam_w(const at::Scalar &beta1_power, const at::Scalar &beta2_power, const at::Scalar &lr,
                                          const at::Scalar &decay, const at::Scalar &beta1, const at::Scalar &beta2,
                                          const at::Scalar &epsilon, const Tensor &grad, const MaybeTensor &largest,
                                          std::optional<bool> amsgrad, std::optional<bool> maximize, at::TensorList out) {
    TORCH_CHECK(!amsgrad.value_or(false) && !maximize.value_or(false), "simulated npu_apply_adam_w: no amsgrad, no maximize");
    Tensor weight = on_host(out[0]), mean = on_host(out[1]), square = on_host(out[2]), slope = on_host(grad).to(mean.scalar_type());
    weight.mul_(1.0 - lr.toDouble() * decay.toDouble());
    mean.mul_(beta1).add_(slope, 1.0 - beta1.toDouble());
    square.mul_(beta2).addcmul_(slope, slope, 1.0 - beta2.toDouble());
    Tensor spread = (square / (1.0 - beta2_power.toDouble())).sqrt_().add_(epsilon);
    weight.sub_((mean / spread).mul_(lr.toDouble() / (1.0 - beta1_power.toDouble())));
    out[0].copy_(weight), out[1].copy_(mean), out[2].copy_(square);
    return {out[0], out[1], out[2]};
}

// --- the overflow flag of a device: this one has none, so the gradients themselves are looked at ---

bool has_non_finite(at::TensorList gradients) {
    for (const Tensor &gradient : gradients)
        if (!at::isfinite(gradient).all().item<bool>()) return true;
    return false;
}

Tensor float_status(const Tensor &input) { return at::zeros({8}, input.options().dtype(at::kFloat)); }
Tensor same_status(const Tensor &input, int64_t) { return input; }

TORCH_LIBRARY_IMPL(npu, PrivateUse1, kernels) {
    struct Quiet : c10::WarningHandler {
        void process(const c10::Warning &) override {}
    } quiet;
    c10::WarningUtils::WarningHandlerGuard guard(&quiet);
    kernels.impl("npu_rms_norm", Kernel<rms_norm>::run);
    kernels.impl("npu_rms_norm_backward", Kernel<rms_norm_backward>::run);
    kernels.impl("npu_rotary_mul", Kernel<rotary>::run);
    kernels.impl("npu_rotary_mul_backward", Kernel<rotary_backward>::run);
    kernels.impl("npu_swiglu", Kernel<swiglu>::run);
    kernels.impl("npu_swiglu_backward", Kernel<swiglu_backward>::run);
    kernels.impl("npu_fusion_attention", Kernel<attention>::run);
    kernels.impl("npu_fusion_attention_grad", Kernel<attention_grad>::run);
    kernels.impl("npu_apply_adam_w.out", adam_w);
    kernels.impl("_amp_foreach_non_finite_check", has_non_finite);
    kernels.impl("npu_alloc_float_status", float_status);
    kernels.impl("npu_get_float_status", same_status);
    kernels.impl("npu_clear_float_status", same_status);
}

}  // namespace
