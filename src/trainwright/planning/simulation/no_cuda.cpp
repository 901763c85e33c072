// Tells a CPU build of torch that there is a CUDA, with device guards and hooks that do nothing, so that fake tensors on
// `cuda` go through autograd. Must be loaded before torch, which asks once.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <mutex>
#include <set>

namespace {
using NoOp = c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA>;
c10::DeviceIndex devices = 1;
thread_local c10::DeviceIndex current = 0;

struct Guard : NoOp { // one stream, events that have always happened
  c10::Device exchangeDevice(c10::Device device) const override {
    const auto before = here();
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override { return here(); }
  void setDevice(c10::Device device) const override { uncheckedSetDevice(device); }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.has_index()) current = device.index();
  }
  c10::DeviceIndex deviceCount() const noexcept override { return devices; }
  c10::Stream getStream(c10::Device device) const noexcept override { return stream(device); }
  c10::Stream getDefaultStream(c10::Device device) const override { return stream(device); }
  c10::Stream getNewStream(c10::Device device, int) const override { return stream(device); }
  c10::Stream exchangeStream(c10::Stream stream) const noexcept override { return stream; }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override {}
  static c10::Device here() { return c10::Device(c10::DeviceType::CUDA, current); }
  static c10::Stream stream(c10::Device device) {
    return c10::Stream(c10::Stream::DEFAULT, device.has_index() ? device : here());
  }
};

Guard guard;
c10::impl::DeviceGuardImplRegistrar registrar(c10::DeviceType::CUDA, &guard);

// The numbers of a generator of the host, by the name of the device.
struct Numbers final : c10::GeneratorImpl {
  at::Generator host;
  explicit Numbers(at::Generator host, c10::DeviceIndex index)
      : GeneratorImpl({c10::DeviceType::CUDA, index}, c10::DispatchKeySet(c10::DispatchKey::CUDA)), host(host) {}
  void set_current_seed(uint64_t seed) override { host.set_current_seed(seed); }
  void set_offset(uint64_t offset) override { host.set_offset(offset); }
  uint64_t get_offset() const override { return host.get_offset(); }
  uint64_t current_seed() const override { return host.current_seed(); }
  uint64_t seed() override { return host.unsafeGetGeneratorImpl()->seed(); }
  void set_state(const c10::TensorImpl& state) override { host.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return host.unsafeGetGeneratorImpl()->get_state(); }
  Numbers* clone_impl() const override { return new Numbers(host.clone(), device_.index()); }
};

std::set<const void*> pinned;
std::mutex pinned_mutex;

struct PinnedAllocator final : c10::Allocator {
  at::DataPtr allocate(size_t bytes) override {
    auto* held = new at::DataPtr(c10::GetCPUAllocator()->allocate(bytes));
    std::lock_guard lock(pinned_mutex);
    pinned.insert(held->get());
    return {held->get(), held, [](void* held) {
              std::lock_guard lock(pinned_mutex);
              pinned.erase(static_cast<at::DataPtr*>(held)->get());
              delete static_cast<at::DataPtr*>(held);
            }, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
};

PinnedAllocator pinned_allocator;
} // namespace

namespace at {
struct CUDAHooks : CUDAHooksInterface {
  explicit CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return devices; }
  DeviceIndex getCurrentDevice() const override { return current; }
  void setCurrentDevice(DeviceIndex index) const override { current = index; }
  DeviceIndex exchangeDevice(DeviceIndex index) const override { return std::exchange(current, index); }
  DeviceIndex maybeExchangeDevice(DeviceIndex index) const override { return std::exchange(current, index); }
  // The device draws what the host would, from the same default generator.
  const Generator& getDefaultGenerator(DeviceIndex) const override {
    static const Generator shared = make_generator<Numbers>(detail::getDefaultCPUGenerator(), DeviceIndex(0));
    return shared;
  }
  Generator getNewGenerator(DeviceIndex index) const override {
    return make_generator<Numbers>(detail::createCPUGenerator(), index < 0 ? current : index);
  }
  Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  bool isPinnedPtr(const void* data) const override {
    std::lock_guard lock(pinned_mutex);
    return pinned.count(data) > 0;
  }
};
REGISTER_CUDA_HOOKS(CUDAHooks)
} // namespace at

extern "C" {
void trainwright_devices(int count) { devices = static_cast<c10::DeviceIndex>(count); }
int trainwright_current() { return current; }
void trainwright_set_current(int index) { current = static_cast<c10::DeviceIndex>(index); }

// The generator of the host that a generator of the device draws from, or nullptr.
at::Generator* trainwright_numbers(const at::Generator* generator) {
  auto* numbers = dynamic_cast<Numbers*>(generator->unsafeGetGeneratorImpl());
  return numbers == nullptr ? nullptr : &numbers->host;
}
}
