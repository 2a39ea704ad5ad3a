#include "model.h"

#include <ATen/record_function.h>
#include <fcntl.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <map>
#include <mutex>
#include <sstream>
#include <tuple>

#include "../null_cuda.h"
#include "costs.h"

namespace null_cuda {
namespace {

Costs now() {
  Costs out{};
  null_cuda_thread_counts(&out.launches, &out.waits);
  return out;
}

// Dtypes and sizes of the tensors among the arguments.
std::string describe(const torch::jit::Stack &stack, size_t first) {
  std::ostringstream out;
  const auto add = [&](const at::Tensor &t) {
    if (t.defined()) out << t.scalar_type() << t.sizes() << (t.is_contiguous() ? " " : "* ");
  };
  for (size_t i = first; i < stack.size() && out.tellp() < 200; ++i) {
    if (stack[i].isTensor()) add(stack[i].toTensor());
    if (stack[i].isTensorList() && stack[i].toTensorVector().size() < 8) {
      for (const at::Tensor &t : stack[i].toTensorVector()) add(t);
    } else if (stack[i].isTensorList()) {
      out << "list of " << stack[i].toTensorVector().size() << " ";
    }
  }
  return out.str();
}

// How often an operator had real launches and waits beside expected ones. NULL_CUDA_MODEL names a file, to which the
// counts are added when the program ends: name, times, launches, waits, launches and waits of the simulation, and the
// arguments of one of the calls.
class Table {
 public:
  bool is_kept() const { return path_ != nullptr; }

  void add(const std::string &name, const Costs &real, const Costs &expected, const std::string &example) {
    const std::lock_guard<std::mutex> guard(mutex_);
    auto &[times, known] = rows_[{name, real.launches, real.waits, expected.launches, expected.waits}];
    if (++times == 1) known = example;
  }

  // Several processes may end at once: each writes all of its lines in one call, which the file appends as a whole.
  ~Table() {
    if (!is_kept() || rows_.empty()) return;
    const std::string lines = text();
    const int file = open(path_, O_WRONLY | O_APPEND | O_CREAT, 0666);
    if (file < 0 || write(file, lines.data(), lines.size()) != static_cast<ssize_t>(lines.size())) {
      perror("null CUDA: NULL_CUDA_MODEL");
    }
    if (file >= 0) close(file);
  }

 private:
  std::string text() const {
    std::ostringstream out;
    for (const auto &[row, value] : rows_) {
      const auto &[times, example] = value;
      const auto &[name, launches, waits, expected_launches, expected_waits] = row;
      out << name << '\t' << times << '\t' << launches << '\t' << waits << '\t' << expected_launches << '\t'
          << expected_waits << '\t' << example << '\n';
    }
    return out.str();
  }

  const char *const path_ = std::getenv("NULL_CUDA_MODEL");
  std::mutex mutex_;
  std::map<std::tuple<std::string, int64_t, int64_t, int64_t, int64_t>, std::pair<int64_t, std::string>> rows_;
};

Table table;

}  // namespace

Comparison::Comparison(const c10::OperatorHandle &op, torch::jit::Stack &stack, const std::string &name)
    : name_(name), expected_{}, before_{} {
  // Tools that watch operators run operators of their own inside of them.
  if (!table.is_kept() || at::getStepCallbacksUnlessEmpty(at::RecordScope::FUNCTION)) return;
  const size_t first = stack.size() - op.schema().arguments().size();
  const simulated::Call call{op.schema(), name, stack, first};
  example_ = describe(stack, first);
  expected_ = {simulated::launches(call), simulated::waits(call) ? 1 : 0};
  before_ = now();
  is_compared_ = true;
}

void Comparison::end() const {
  if (!is_compared_) return;
  const Costs after = now();
  table.add(name_, {after.launches - before_.launches, after.waits - before_.waits}, expected_, example_);
}

}  // namespace null_cuda
