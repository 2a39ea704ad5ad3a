#include "arrivals.h"

#include <ATen/ops/clone.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <limits>
#include <map>
#include <mutex>
#include <utility>

#include "settings.h"

namespace simulated {
namespace {

struct Copy {
  uint64_t number;
  at::Tensor from, to;
};

struct Queue {
  std::mutex mutex;
  uint64_t sent = 0;
  std::deque<Copy> copies;
  std::map<std::pair<c10::DeviceIndex, c10::StreamId>, uint64_t> last;  // of each stream
};

// Never destroyed: a copy may be under way when the program ends.
Queue &queue() {
  static Queue *const it = new Queue;
  return *it;
}

// Nothing of autograd or autocast: neither the copy nor the snapshot is an operation of the program.
using Plain = c10::impl::ExcludeDispatchKeyGuard;
std::pair<c10::DeviceIndex, c10::StreamId> key_of(const c10::Stream &stream) {
  return {stream.device_index(), stream.id()};
}

c10::DispatchKeySet not_plain() { return c10::autograd_dispatch_keyset | c10::autocast_dispatch_keyset; }

}  // namespace

void send(const at::Tensor &from, const at::Tensor &to, const c10::Stream &stream) {
  const Plain plain(not_plain());
  if (lag() == 0) {
    to.copy_(from);
    return;
  }
  // Later kernels may write to the source; what was there when the copy was asked for is what arrives.
  const at::Tensor snapshot = from.clone();
  const at::Tensor target = to.detach();
  if (to.is_contiguous() && to.nbytes() != 0) memset(to.data_ptr(), 0xff, to.nbytes());
  const std::lock_guard<std::mutex> lock(queue().mutex);
  queue().copies.push_back({++queue().sent, snapshot, target});
  queue().last[key_of(stream)] = queue().sent;
}

uint64_t last_before(const c10::Stream &stream) {
  const std::lock_guard<std::mutex> lock(queue().mutex);
  const auto found = queue().last.find(key_of(stream));
  return found == queue().last.end() ? 0 : found->second;
}

void order_after(const c10::Stream &stream, uint64_t last) {
  const std::lock_guard<std::mutex> lock(queue().mutex);
  uint64_t &known = queue().last[key_of(stream)];
  known = std::max(known, last);
}

void arrive_for(const c10::Stream &stream, const at::Tensor &memory) {
  const uint64_t last = last_before(stream);
  const Plain plain(not_plain());
  const std::lock_guard<std::mutex> lock(queue().mutex);
  auto &copies = queue().copies;
  for (auto it = copies.begin(); it != copies.end() && it->number <= last;) {
    if (!it->to.is_alias_of(memory)) {
      ++it;
      continue;
    }
    it->to.copy_(it->from);
    it = copies.erase(it);
  }
}

uint64_t sent() {
  const std::lock_guard<std::mutex> lock(queue().mutex);
  return queue().sent;
}

bool has_arrived(uint64_t count) {
  const std::lock_guard<std::mutex> lock(queue().mutex);
  return queue().copies.empty() || queue().copies.front().number > count;
}

void arrive(uint64_t count) {
  const Plain plain(not_plain());
  const std::lock_guard<std::mutex> lock(queue().mutex);
  auto &copies = queue().copies;
  while (!copies.empty() && copies.front().number <= count) {
    copies.front().to.copy_(copies.front().from);
    copies.pop_front();
  }
}

void arrive_all() { arrive(std::numeric_limits<uint64_t>::max()); }

}  // namespace simulated
