// Gives the CUDA device of no_cuda.cpp real memory, which is the host's, and real kernels, which are the CPU's. Tensors
// on `cuda` have the device and the dispatch of CUDA, and an operation that mixes devices is an error. Collectives of such
// tensors run on the process group's backend for the host. To be loaded after no_cuda.cpp, before torch.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/Functions.h>
#include <ATen/core/Tensor.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <atomic>
#include <cstring>
#include <unordered_set>

extern "C" at::Generator* trainwright_numbers(const at::Generator* generator);

namespace {
using at::IValue;
using at::Storage;
using at::StorageImpl;
using at::Tensor;
using c10::Device;
using c10::DispatchKey;
using c10::DispatchKeySet;

std::atomic<int64_t> live{0}, peak{0};

Device current() { return c10::impl::getDeviceGuardImpl(c10::DeviceType::CUDA)->getDevice(); }

Device whole(Device device) { return device.has_index() ? device : current(); }

// Memory that is the host's, kept by `held`, and counted as the device's while it lives.
struct Held {
  Storage held;
  int64_t bytes;
};

at::DataPtr lent(Storage host, Device device) {
  auto* held = new Held{host, static_cast<int64_t>(host.nbytes())};
  const int64_t now = live += held->bytes;
  for (int64_t most = peak; most < now && !peak.compare_exchange_weak(most, now);) {
  }
  return {host.mutable_data(), held, [](void* held) {
            live -= static_cast<Held*>(held)->bytes;
            delete static_cast<Held*>(held);
          }, device};
}

struct Allocator final : c10::Allocator {
  at::DataPtr allocate(size_t bytes) override {
    return lent(Storage(Storage::use_byte_size_t(), bytes, c10::GetCPUAllocator(), true), current());
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
};

Allocator allocator;
const DispatchKeySet on_device(DispatchKey::CUDA), on_host(DispatchKey::CPU);

Tensor tensor_of(Storage storage, const Tensor& like, DispatchKeySet keys) {
  auto made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), keys, like.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  return made;
}

// The storages of one operation on the device, each with its counterpart on the host: the same bytes.
class Counterparts {
 public:
  explicit Counterparts(const c10::OperatorHandle& op) : name_(op.schema().name()) {}

  Device device() const { return device_.value_or(current()); }

  IValue to_host(const IValue& value) {
    if (value.isTensor()) return value.toTensor().defined() ? IValue(to_host(value.toTensor())) : value;
    if (value.isStorage()) return to_host(value.toStorage());
    if (value.isGenerator()) return to_host(value.toGenerator());
    if (value.isDevice() && value.toDevice().is_cuda()) {
      use(whole(value.toDevice()));
      return Device(c10::DeviceType::CPU);
    }
    return mapped(value, [this](const IValue& one) { return to_host(one); });
  }

  IValue to_device(const IValue& value) {
    if (value.isTensor()) return value.toTensor().defined() ? IValue(to_device(value.toTensor())) : value;
    return mapped(value, [this](const IValue& one) { return to_device(one); });
  }

  // What an operation has resized or given other memory on the host.
  void follow(const Tensor& tensor, const Tensor& host) {
    Storage storage = on_device_of(host.storage());
    auto* impl = tensor.unsafeGetTensorImpl();
    if (!tensor.storage().is_alias_of(storage)) impl->set_storage_keep_dtype(storage);
    if (tensor.sizes() != host.sizes() || tensor.strides() != host.strides() ||
        tensor.storage_offset() != host.storage_offset())
      impl->set_sizes_and_strides(host.sizes(), host.strides(), host.storage_offset());
  }

  void follow() {
    for (auto& [device, host] : pairs_)
      if (host.data() != device.data() || host.nbytes() != device.nbytes()) {
        device.set_data_ptr_noswap(lent(host, device.device()));
        device.set_nbytes(host.nbytes());
      }
  }

  // Tensors of the host may take part where CUDA allows them: as numbers, and where the operation copies.
  void check_mix() const {
    if (!hosts_.empty() && device_ && !copies()) refuse(hosts_[0].device());
  }

 private:
  std::string name_;
  std::optional<Device> device_;
  std::vector<Tensor> hosts_;
  std::vector<std::pair<Storage, Storage>> pairs_;

  bool copies() const {
    static const std::unordered_set<std::string> copying{
        "aten::copy_", "aten::_copy_from", "aten::index", "aten::index_put_", "aten::_index_put_impl_"};
    return copying.count(name_) > 0;
  }

  void refuse(Device other) const {
    TORCH_CHECK(false, "Expected all tensors to be on the same device, but found at least two devices, ", *device_,
                " and ", other, "! (when checking arguments of ", name_, ")");
  }

  void use(Device device) {
    if (device_ && *device_ != device && !copies()) refuse(device);
    device_ = device;
  }

  Tensor to_host(const Tensor& tensor) {
    if (!tensor.is_cuda()) {
      if (tensor.dim() > 0) hosts_.push_back(tensor);
      return tensor;
    }
    use(tensor.device());
    TORCH_CHECK(tensor.layout() == c10::kStrided, name_, ": only strided tensors have host memory");
    return tensor_of(to_host(tensor.storage()), tensor, on_host);
  }

  at::Generator to_host(const at::Generator& generator) {
    auto* numbers = trainwright_numbers(&generator);
    TORCH_CHECK(numbers != nullptr, "Expected a 'cuda' device type for generator but found '", generator.device(), "'");
    return *numbers;
  }

  Storage to_host(const Storage& storage) {
    if (storage.device_type() != c10::DeviceType::CUDA) return storage;
    for (const auto& [device, host] : pairs_)
      if (device.is_alias_of(storage)) return host;
    auto* owner = new Storage(storage);
    at::DataPtr bytes(storage.mutable_data(), owner, [](void* owner) { delete static_cast<Storage*>(owner); },
                      Device(c10::DeviceType::CPU));
    Storage host(Storage::use_byte_size_t(), storage.nbytes(), std::move(bytes), c10::GetCPUAllocator(), true);
    pairs_.emplace_back(storage, host);
    return host;
  }

  Tensor to_device(const Tensor& host) {
    if (!host.is_cpu()) return host;
    for (const auto& given : hosts_)
      if (given.is_same(host)) return host;
    return tensor_of(on_device_of(host.storage()), host, on_device);
  }

  Storage on_device_of(const Storage& storage) {
    for (const auto& [device, host] : pairs_)
      if (host.is_alias_of(storage)) return device;
    Storage made(Storage::use_byte_size_t(), storage.nbytes(), lent(storage, device()), &allocator, true);
    pairs_.emplace_back(made, storage);
    return made;
  }

  template <typename F>
  static IValue mapped(const IValue& value, F&& one) {
    if (!value.isList()) return value;
    auto list = value.toList();
    auto found = c10::impl::GenericList(list.elementType());
    found.reserve(list.size());
    for (const IValue& item : list.vec()) found.push_back(one(item));
    return found;
  }
};

// An operation on the device: the CPU's kernel, on the same bytes.
void on_the_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto count = schema.arguments().size();
  Counterparts counterparts(op);
  std::vector<IValue> given(stack->end() - count, stack->end()), hosts;
  for (const auto& value : given) hosts.push_back(counterparts.to_host(value));
  counterparts.check_mix();
  stack->resize(stack->size() - count);
  for (const auto& value : hosts) stack->push_back(value);
  op.redispatchBoxed(on_host, stack);
  counterparts.follow();
  for (size_t i = 0; i < count; ++i) {
    const auto* alias = schema.arguments()[i].alias_info();
    if (alias == nullptr || !alias->isWrite()) continue;
    if (given[i].isTensor() && given[i].toTensor().is_cuda())
      counterparts.follow(given[i].toTensor(), hosts[i].toTensor());
  }
  const auto returned = schema.returns().size();
  for (auto value = stack->end() - returned; value != stack->end(); ++value) {
    bool same = false;
    for (size_t i = 0; i < count && !same; ++i)
      if (value->isTensor() && hosts[i].isTensor() && value->toTensor().is_same(hosts[i].toTensor())) {
        *value = given[i];
        same = true;
      }
    if (!same) *value = counterparts.to_device(*value);
  }
}

Tensor empty(c10::IntArrayRef sizes, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
             std::optional<Device> device, std::optional<bool> pinned, std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(!pinned.value_or(false), "Only dense CPU tensors can be pinned");
  c10::DeviceGuard guard(whole(device.value_or(current())));
  return Tensor(at::detail::empty_generic(sizes, &allocator, on_device, c10::dtype_or_default(dtype), format));
}

Tensor empty_strided(c10::IntArrayRef sizes, c10::IntArrayRef strides, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout>, std::optional<Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(whole(device.value_or(current())));
  return Tensor(at::detail::empty_strided_generic(sizes, strides, &allocator, on_device, c10::dtype_or_default(dtype)));
}

// Attention as products and softmax, whose kernels the CPU has for any mask.
Tensor attention(const Tensor& query, const Tensor& key, const Tensor& value, const std::optional<Tensor>& mask,
                 double dropout, bool causal, std::optional<double> scale, bool grouped) {
  return std::get<0>(at::_scaled_dot_product_attention_math(query, key, value, mask, dropout, causal, {}, scale, grouped));
}

struct Silent final : c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

// Operations that are the same code for every device, but call a kernel of it that is not registered by name.
const char* const DIRECT[] = {"copy_"};

const char* const COLLECTIVES[] = {
    "send", "recv_", "recv_any_source_", "reduce_", "broadcast_", "allreduce_", "allreduce_coalesced_", "allgather_",
    "_allgather_base_", "allgather_coalesced_", "allgather_into_tensor_coalesced_", "reduce_scatter_",
    "_reduce_scatter_base_", "reduce_scatter_tensor_coalesced_", "gather_", "scatter_", "alltoall_", "alltoall_base_"};

struct Registered {
  Silent silent; // that torch's own kernels of collectives are replaced is what is wanted
  c10::WarningUtils::WarningHandlerGuard guard{&silent};
  torch::Library all{torch::Library::IMPL, "_", DispatchKey::CUDA, __FILE__, __LINE__};
  torch::Library aten{torch::Library::IMPL, "aten", DispatchKey::CUDA, __FILE__, __LINE__};
  torch::Library autograd{torch::Library::IMPL, "aten", DispatchKey::AutogradCUDA, __FILE__, __LINE__};
  torch::Library c10d{torch::Library::IMPL, "c10d", DispatchKey::CUDA, __FILE__, __LINE__};

  Registered() {
    const auto boxed = [] { return torch::CppFunction::makeFromBoxedFunction<&on_the_host>(); };
    all.fallback(boxed());
    aten.impl("empty.memory_format", TORCH_FN(empty));
    aten.impl("empty_strided", TORCH_FN(empty_strided));
    aten.impl("scaled_dot_product_attention", TORCH_FN(attention));
    autograd.impl("scaled_dot_product_attention", TORCH_FN(attention));
    for (const char* name : DIRECT) aten.impl(name, boxed());
    for (const char* name : COLLECTIVES) c10d.impl(name, boxed());
  }
};

Registered* const registered = new Registered;
} // namespace

extern "C" {
int64_t trainwright_live_bytes() { return live; }
int64_t trainwright_peak_bytes() { return peak; }
void trainwright_reset_peak() { peak = live.load(); }

// Unlike torch's own resize of storages of CUDA, which a build for CPUs does not have.
void trainwright_resize(StorageImpl* storage, int64_t bytes) {
  Storage host(Storage::use_byte_size_t(), bytes, c10::GetCPUAllocator(), true);
  std::memcpy(host.mutable_data(), storage->data(), std::min<size_t>(bytes, storage->nbytes()));
  storage->set_data_ptr_noswap(lent(host, storage->device()));
  storage->set_nbytes(bytes);
}
}
