#include "model.h"

#include <cstdio>
#include <cstdlib>
#include <map>
#include <mutex>
#include <tuple>

#include "../null_cuda.h"
#include "semantics.h"

namespace null_cuda {
namespace {

Costs now() {
  Costs out{};
  null_cuda_thread_counts(&out.launches, &out.waits);
  return out;
}

// How often an operator had real launches and waits beside expected ones. NULL_CUDA_MODEL names a file, to which the
// counts are added when the program ends: name, times, launches, waits, launches and waits of the simulation.
class Table {
 public:
  bool is_kept() const { return path_ != nullptr; }

  void add(const std::string &name, const Costs &real, const Costs &expected) {
    const std::lock_guard<std::mutex> guard(mutex_);
    ++rows_[{name, real.launches, real.waits, expected.launches, expected.waits}];
  }

  ~Table() {
    if (!is_kept() || rows_.empty()) return;
    FILE *file = fopen(path_, "a");
    if (file == nullptr) {
      perror("null CUDA: NULL_CUDA_MODEL");
      return;
    }
    for (const auto &[row, times] : rows_) {
      const auto &[name, launches, waits, expected_launches, expected_waits] = row;
      fprintf(file, "%s\t%lld\t%lld\t%lld\t%lld\t%lld\n", name.c_str(), static_cast<long long>(times),
              static_cast<long long>(launches), static_cast<long long>(waits),
              static_cast<long long>(expected_launches), static_cast<long long>(expected_waits));
    }
    fclose(file);
  }

 private:
  const char *const path_ = std::getenv("NULL_CUDA_MODEL");
  std::mutex mutex_;
  std::map<std::tuple<std::string, int64_t, int64_t, int64_t, int64_t>, int64_t> rows_;
};

Table table;

}  // namespace

Comparison::Comparison(const c10::OperatorHandle &op, torch::jit::Stack &stack, const std::string &name)
    : name_(name), expected_{}, before_{} {
  if (!table.is_kept()) return;
  const simulated::Call call{op.schema(), name, stack, stack.size() - op.schema().arguments().size()};
  expected_ = {simulated::launches(call), simulated::waits(call) ? 1 : 0};
  before_ = now();
}

void Comparison::end() const {
  if (!table.is_kept()) return;
  const Costs after = now();
  table.add(name_, {after.launches - before_.launches, after.waits - before_.waits}, expected_);
}

}  // namespace null_cuda
