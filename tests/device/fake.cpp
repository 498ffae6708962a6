// An accelerator in host memory, for tests: PyTorch's PrivateUse1 backend with the rules of CUDA. Every operator runs on
// the CPU, but calls that mix devices are refused as CUDA refuses them, and what is launched, moved and kept is counted.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/native/TensorFactories.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/alloc_cpu.h>
#include <torch/extension.h>

#include <atomic>

namespace {

using at::Tensor;
using Maybe = std::optional<Tensor>;

constexpr auto FAKE = c10::DeviceType::PrivateUse1;
constexpr int DEVICES = 2;
thread_local c10::DeviceIndex current = 0;

// ----------------------------------------------------------------------------------------------------------- counters

std::atomic<int64_t> launches{0}, uploads{0}, downloads{0}, scalars{0}, uploaded{0}, downloaded{0};  // last two: bytes
std::atomic<int64_t> allocated{0}, peak{0}, limit{0};  // bytes on both devices; a limit of 0 is none
bool float64 = true;                                   // false: refuse float64, as MPS does
thread_local int depth = 0;                            // > 0 inside an operator, whose own copies are not counted

struct Inside {
  Inside() { depth++; }
  ~Inside() { depth--; }
};

void count(std::atomic<int64_t>& counter, int64_t n = 1) {
  if (depth == 0) counter += n;
}

// ----------------------------------------------------------------------------------------------------- memory, devices

constexpr size_t HEADER = 64;  // bytes before each block, which hold its size

void release(void* block) {
  allocated -= *static_cast<int64_t*>(block);
  c10::free_cpu(block);
}

struct Memory final : at::Allocator {
  at::DataPtr allocate(size_t n) override {
    TORCH_CHECK_WITH(OutOfMemoryError, limit == 0 || allocated + static_cast<int64_t>(n) <= limit,
                     "fakegpu out of memory. Tried to allocate ", n, " bytes of ", limit, ", ", allocated, " in use.");
    void* block = c10::alloc_cpu(n + HEADER);
    *static_cast<int64_t*>(block) = static_cast<int64_t>(n);
    allocated += static_cast<int64_t>(n);
    peak = std::max<int64_t>(peak, allocated);
    return {static_cast<char*>(block) + HEADER, block, &release, at::Device(FAKE, current)};
  }
  void copy_data(void* to, const void* from, std::size_t n) const final { default_copy_data(to, from, n); }
};
Memory memory;
REGISTER_ALLOCATOR(FAKE, &memory);

void choose(c10::DeviceIndex i) {
  TORCH_CHECK(i >= 0 && i < DEVICES, "fakegpu: invalid device ordinal");
  current = i;
}

// One stream, whose work ends before the call returns.
c10::Stream default_stream(c10::Device d) { return c10::Stream(c10::Stream::DEFAULT, d); }

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = FAKE;
  Guard() = default;
  explicit Guard(c10::DeviceType) {}
  c10::DeviceType type() const override { return FAKE; }
  c10::Device getDevice() const override { return {FAKE, current}; }
  c10::Device exchangeDevice(c10::Device d) const override {
    auto before = getDevice();
    setDevice(d);
    return before;
  }
  void setDevice(c10::Device d) const override {
    if (d.has_index()) choose(d.index());
  }
  void uncheckedSetDevice(c10::Device d) const noexcept override {
    if (d.has_index()) current = d.index();
  }
  c10::Stream getStream(c10::Device d) const override { return default_stream(d); }
  c10::Stream getDefaultStream(c10::Device d) const override { return default_stream(d); }
  c10::Stream getNewStream(c10::Device d, int) const override { return default_stream(d); }
  c10::Stream exchangeStream(c10::Stream s) const override { return s; }
  c10::DeviceIndex deviceCount() const noexcept override { return DEVICES; }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeStream(const c10::Stream&) const override {}
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

// The CPU's algorithm with a state of its own.
struct Generator final : at::CPUGeneratorImpl {
  explicit Generator(c10::DeviceIndex i) : at::CPUGeneratorImpl(c10::default_rng_seed_val) {
    device_ = c10::Device(FAKE, i);
    key_set_ = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
  }
};

at::Generator& default_generator(c10::DeviceIndex i) {
  static at::Generator all[DEVICES] = {at::make_generator<Generator>(0), at::make_generator<Generator>(1)};
  return all[i < 0 ? current : i];
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return DEVICES; }
  c10::DeviceIndex getCurrentDevice() const override { return current; }
  void setCurrentDevice(c10::DeviceIndex i) const override { choose(i); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex i) const override { return std::exchange(current, i); }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex i) const override { return std::exchange(current, i); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex i) const override { return default_generator(i); }
  at::Generator getNewGenerator(c10::DeviceIndex i) const override {
    return at::make_generator<Generator>(i < 0 ? current : i);
  }
  at::Allocator* getPinnedMemoryAllocator() const override { return c10::GetCPUAllocator(); }
  void resizePrivateUse1Bytes(const c10::Storage& s, size_t n) const override {
    at::DataPtr fresh = memory.allocate(n);
    if (s.nbytes()) std::memcpy(fresh.get(), s.data(), std::min(n, s.nbytes()));
    s.set_data_ptr_noswap(std::move(fresh));
    s.set_nbytes(n);
  }
};

// ------------------------------------------------------------------------------------- tensors: made, viewed and moved

c10::Device resolve(std::optional<c10::Device> d) { return d && d->has_index() ? *d : c10::Device(FAKE, current); }

c10::ScalarType supported(std::optional<c10::ScalarType> dtype) {
  TORCH_CHECK_TYPE(float64 || depth || c10::dtype_or_default(dtype) != at::kDouble,
                   "Cannot convert a fakegpu Tensor to float64 dtype as the fakegpu framework doesn't support float64. "
                   "Please use float32 instead.");
  return c10::dtype_or_default(dtype);
}

Tensor empty(c10::IntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
             std::optional<c10::Device> d, std::optional<bool>, std::optional<c10::MemoryFormat> format) {
  const c10::DeviceGuard guard(resolve(d));
  return at::detail::empty_generic(size, &memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), supported(dtype),
                                   format);
}

Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<c10::ScalarType> dtype,
                     std::optional<c10::Layout>, std::optional<c10::Device> d, std::optional<bool>) {
  const c10::DeviceGuard guard(resolve(d));
  return at::detail::empty_strided_generic(size, stride, &memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           supported(dtype));
}

// A tensor of the CPU on the memory of `x`.
Tensor host(const Tensor& x) {
  if (!x.defined() || !x.is_privateuseone()) return x;
  Tensor out = at::from_blob(x.data_ptr(), x.sizes(), x.strides(), x.options().device(at::kCPU).requires_grad(false));
  if (x.is_conj()) out = out.conj();
  return x.is_neg() ? out._neg_view() : out;
}

Maybe host(const Maybe& x) { return x && x->defined() ? Maybe(host(*x)) : std::nullopt; }

Tensor copy_from(const Tensor& from, const Tensor& to, bool) {
  const auto bytes = static_cast<int64_t>(from.nbytes());
  if (from.is_cpu()) count(uploads), count(uploaded, bytes);
  else if (to.is_cpu()) count(downloads), count(downloaded, bytes);
  else count(launches);
  at::AutoDispatchBelowADInplaceOrView below;
  host(to).copy_(host(from));
  return to;
}

Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  to.resize_(from.sizes());
  return copy_from(from, to, false);
}

at::Scalar local_scalar(const Tensor& x) {
  count(scalars);
  return host(x).item();
}

Tensor& set_storage(Tensor& x, at::Storage s, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
  return at::native::set_storage_meta__symint(x, s, offset, c10::fromIntArrayRefSlow(size),
                                              c10::fromIntArrayRefSlow(stride));
}

// ----------------------------------------------------------------------------------------------------------- operators

template <typename F>
void each_tensor(const c10::IValue& v, F see) {
  if (v.isTensor()) see(v.toTensor());
  if (v.isTensorList()) for (const Tensor& x : v.toTensorVector()) see(x);
  if (v.isOptionalTensorList()) for (const Maybe& x : v.toOptionalTensorVector()) if (x) see(*x);
}

template <typename... Where>
void refuse(const std::string& name, const Where&... where) {
  TORCH_CHECK(false, "Expected all tensors to be on the same device, but found at least two devices, ", where..., "! (",
              name, ")");
}

// Return the device of a call: that of its tensors of this backend, or the one that it names.
std::optional<c10::Device> device_of(const c10::FunctionSchema& schema, at::ArrayRef<c10::IValue> args) {
  std::optional<c10::Device> found;
  for (const auto& v : args) {
    each_tensor(v, [&](const Tensor& x) {
      if (!x.defined() || !x.is_privateuseone()) return;
      if (found && *found != x.device()) refuse(schema.name(), *found, " and ", x.device());
      found = x.device();
    });
    if (v.isDevice() && !found) found = v.toDevice();
  }
  return found && found->is_privateuseone() ? found : std::nullopt;
}

// Return an operand as CUDA reads it: numbers without axes and index tensors may lie on the CPU, if they are only read.
Tensor operand(const Tensor& x, const c10::Argument& arg, c10::Device device, bool index, const std::string& name) {
  if (!x.defined() || !x.is_cpu()) return x;
  const bool written = arg.alias_info() && arg.alias_info()->isWrite();
  if ((x.dim() > 0 && !index) || written) refuse(name, device, " and cpu, argument ", arg.name());
  if (x.unsafeGetTensorImpl()->is_wrapped_number()) return x;  // a Python number has no part in the type of the result
  if (index) return x.to(device);  // a copy that counts
  Inside inside;
  return x.to(device);
}

// Check the operands as CUDA does, then run the operator on the CPU.
void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& args = op.schema().arguments();
  const std::string& name = op.schema().name();
  const bool indexing = name.rfind("aten::index", 0) == 0 || name == "aten::_index_put_impl_";
  auto* values = stack->data() + stack->size() - args.size();
  at::Generator own, lent;  // the CPU draws from `lent`, which has the state of the device's own
  if (const auto device = device_of(op.schema(), at::ArrayRef<c10::IValue>(values, args.size()))) {
    for (size_t i = 0; i < args.size(); i++) {
      auto& v = values[i];
      if (v.isTensor()) {
        v = operand(v.toTensor(), args[i], *device, false, name);
      } else if (v.isOptionalTensorList()) {
        c10::List<Maybe> placed;
        for (const Maybe& x : v.toOptionalTensorVector())
          placed.push_back(x && x->defined() ? Maybe(operand(*x, args[i], *device, indexing, name)) : std::nullopt);
        v = placed;
      } else if (args[i].name() == "generator") {
        own = v.isGenerator() && v.toGenerator().defined() ? v.toGenerator() : default_generator(device->index());
        TORCH_CHECK(own.device().type() == FAKE, "Expected a 'fakegpu' device type for generator but found '",
                    own.device(), "'");
        lent = at::detail::createCPUGenerator();
        lent.set_state(own.get_state());
        v = lent;
      } else {
        each_tensor(v, [&](const Tensor& x) { operand(x, args[i], *device, false, name); });
      }
    }
  }
  count(launches);
  Inside inside;
  at::native::cpu_fallback(op, stack);
  if (own.defined()) own.set_state(lent.get_state());
}

// Count a launch of an operator with a kernel here, and check that its tensors lie on one device.
void launch(const char* name, std::initializer_list<Maybe> tensors) {
  const c10::Device device = (*tensors.begin())->device();
  for (const Maybe& x : tensors)
    if (x && x->defined() && x->device() != device) refuse(name, device, " and ", x->device());
  count(launches);
}

Tensor convolution(const Tensor& x, const Tensor& w, const Maybe& b, c10::IntArrayRef stride, c10::IntArrayRef padding,
                   c10::IntArrayRef dilation, bool transposed, c10::IntArrayRef extra, int64_t groups) {
  launch("aten::convolution", {x, w, b});
  Inside inside;
  return at::convolution(host(x), host(w), host(b), stride, padding, dilation, transposed, extra, groups).to(x.device());
}

using Three = std::tuple<Tensor, Tensor, Tensor>;

Three to_device(const Three& on_cpu, c10::Device d) {
  auto move = [&](const Tensor& t) { return t.defined() ? t.to(d) : t; };
  return {move(std::get<0>(on_cpu)), move(std::get<1>(on_cpu)), move(std::get<2>(on_cpu))};
}

Three convolution_backward(const Tensor& g, const Tensor& x, const Tensor& w, c10::IntArrayRef stride,
                           c10::IntArrayRef padding, c10::IntArrayRef dilation, bool transposed,
                           c10::IntArrayRef extra, int64_t groups, std::array<bool, 3> mask) {
  launch("aten::convolution_backward", {g, x, w});
  Inside inside;
  const std::vector<int64_t> bias{g.size(1)};
  return to_device(at::convolution_backward(host(g), host(x), host(w), at::IntArrayRef(bias), stride, padding, dilation,
                                            transposed, extra, groups, mask), x.device());
}

// A kernel here, because its schema does not declare that it writes the running statistics.
Three batch_norm(const Tensor& x, const Maybe& w, const Maybe& b, const Maybe& mean, const Maybe& variance,
                 bool training, double momentum, double eps) {
  launch("aten::native_batch_norm", {x, w, b, mean, variance});
  Inside inside;
  return to_device(at::native_batch_norm(host(x), host(w), host(b), host(mean), host(variance), training, momentum,
                                         eps), x.device());
}

// The cells of recurrent layers, which are operators of their own on every device but the CPU.
Tensor gates_of(const Tensor& x, const Maybe& bias) {
  return bias && bias->defined() ? host(x) + host(*bias) : host(x);
}

Tensor bias_of(const Tensor& gates, bool biased) { return biased ? gates.sum(0) : Tensor(); }

Three lstm_cell(const Tensor& x, const Tensor& h, const Tensor& c, const Maybe& x_bias, const Maybe& h_bias) {
  launch("aten::_thnn_fused_lstm_cell", {x, h, c, x_bias, h_bias});
  Inside inside;
  const auto parts = (gates_of(x, x_bias) + gates_of(h, h_bias)).chunk(4, -1);
  const Tensor i = parts[0].sigmoid(), f = parts[1].sigmoid(), g = parts[2].tanh(), o = parts[3].sigmoid();
  const Tensor cell = f * host(c) + i * g;
  return to_device({o * cell.tanh(), cell, at::cat({i, f, g, o}, -1)}, x.device());
}

Three lstm_cell_backward(const Maybe& dh, const Maybe& dc, const Tensor& before, const Tensor& after,
                         const Tensor& gates, bool biased) {
  launch("aten::_thnn_fused_lstm_cell_backward", {gates, dh, dc, before, after});
  Inside inside;
  const auto parts = host(gates).chunk(4, -1);
  const Tensor &i = parts[0], &f = parts[1], &g = parts[2], &o = parts[3], out = host(after).tanh();
  const Tensor by_h = dh && dh->defined() ? host(*dh) : at::zeros_like(out);
  Tensor by_c = by_h * o * (1 - out * out);
  if (dc && dc->defined()) by_c = by_c + host(*dc);
  const Tensor all = at::cat({by_c * g * i * (1 - i), by_c * host(before) * f * (1 - f), by_c * i * (1 - g * g),
                              by_h * out * o * (1 - o)}, -1);
  return to_device({all, by_c * f, bias_of(all, biased)}, gates.device());
}

std::tuple<Tensor, Tensor> gru_cell(const Tensor& x, const Tensor& h, const Tensor& before, const Maybe& x_bias,
                                    const Maybe& h_bias) {
  launch("aten::_thnn_fused_gru_cell", {x, h, before, x_bias, h_bias});
  Inside inside;
  const auto given = gates_of(x, x_bias).chunk(3, -1), states = gates_of(h, h_bias).chunk(3, -1);
  const Tensor r = (given[0] + states[0]).sigmoid(), z = (given[1] + states[1]).sigmoid();
  const Tensor n = (given[2] + r * states[2]).tanh(), state = host(before);
  return {(n + z * (state - n)).to(x.device()), at::cat({r, z, n, state, states[2]}, -1).to(x.device())};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> gru_cell_backward(const Tensor& dh, const Tensor& kept, bool biased) {
  launch("aten::_thnn_fused_gru_cell_backward", {kept, dh});
  Inside inside;
  const auto parts = host(kept).chunk(5, -1);
  const Tensor &r = parts[0], &z = parts[1], &n = parts[2], &state = parts[3], &hidden = parts[4], by = host(dh);
  const Tensor by_n = by * (1 - z) * (1 - n * n), by_z = by * (state - n) * z * (1 - z);
  const Tensor by_r = by_n * hidden * r * (1 - r);
  const Tensor given = at::cat({by_r, by_z, by_n}, -1), states = at::cat({by_r, by_z, by_n * r}, -1);
  const auto [x, h, before] = to_device({given, states, by * z}, kept.device());
  const auto [x_bias, h_bias, none] = to_device({bias_of(given, biased), bias_of(states, biased), {}}, kept.device());
  return {x, h, before, x_bias, h_bias};
}

int64_t attention(const Tensor&, const Tensor&, const Tensor&, const Maybe&, double, bool, std::optional<double>, bool) {
  return static_cast<int64_t>(sdp::SDPBackend::math);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("view", at::native::view);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("unfold", at::native::unfold);
  m.impl("view_as_real", at::native::view_as_real);
  m.impl("view_as_complex", at::native::view_as_complex);
  m.impl("resize_", static_cast<const Tensor& (*)(const Tensor&, c10::IntArrayRef, std::optional<at::MemoryFormat>)>(
                        at::native::resize_));
  m.impl("set_.source_Storage", static_cast<Tensor& (*)(Tensor&, at::Storage)>(at::native::set_));
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("set_.source_Tensor", at::native::set_tensor_);
  m.impl("convolution_overrideable", convolution);
  m.impl("convolution_backward_overrideable", convolution_backward);
  m.impl("native_batch_norm", batch_norm);
  m.impl("_thnn_fused_lstm_cell", lstm_cell);
  m.impl("_thnn_fused_lstm_cell_backward_impl", lstm_cell_backward);
  m.impl("_thnn_fused_gru_cell", gru_cell);
  m.impl("_thnn_fused_gru_cell_backward", gru_cell_backward);
  m.impl("_fused_sdp_choice", attention);
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  KERNEL_PRIVATEUSEONE(conv1d, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(conv2d, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(conv3d, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(mm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(bmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(addmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(matmul, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(linear, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(exp, fp32)
  KERNEL_PRIVATEUSEONE(pow, Tensor_Scalar, fp32)
}

}  // namespace

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &attention)
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  m.def("current", [] { return static_cast<int>(current); });
  m.def("set_current", [](int i) { choose(static_cast<c10::DeviceIndex>(i)); });
  m.def("generator", [](int i) { return default_generator(static_cast<c10::DeviceIndex>(i)); });
  m.def("allow_float64", [](bool allowed) { float64 = allowed; });
  m.def("limit_memory", [](int64_t bytes) { limit = bytes; });
  m.def("counts", [] {
    return std::map<std::string, int64_t>{
        {"launches", launches}, {"uploads", uploads}, {"downloads", downloads}, {"scalars", scalars},
        {"uploaded", uploaded}, {"downloaded", downloaded}, {"allocated", allocated}, {"peak", peak}};
  });
  m.def("reset", [] {
    launches = uploads = downloads = scalars = uploaded = downloaded = 0;
    peak = allocated.load();
  });
}
