// The callbacks of a recording.
#pragma once

// record_function.h declares fields of its own in a debug build, which libtorch's binaries do not have.
#ifndef NDEBUG
#define NDEBUG
#endif

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/record_function.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/function.h>

#include <memory>
#include <optional>
#include <string_view>
#include <vector>

#include "border/regions.h"
#include "insight/recording.h"

namespace tamp {

// Keeps the own work of this folder from being recorded, differentiated, or run in the program's regions.
struct Unnoticed {
  at::RecordFunctionGuard unrecorded{false};
  c10::NoGradGuard no_grad;
  OutsideRegions own;
};

// A shared pointer, whose class differs between versions of libtorch.
using Node = std::decay_t<decltype(std::declval<const at::Tensor &>().grad_fn())>;

// What is kept while an operator runs.
struct Running : at::ObserverContext {
  std::shared_ptr<tamp_recording> recording;
  int64_t event = -1;
  std::optional<c10::OperatorHandle> op;
  std::vector<c10::IValue> arguments;  // of operators only
  std::vector<Node> nodes;             // that made the arguments
  std::vector<c10::Device> devices;    // in a timed recording
};

// Null if the recording is stopped or has failed.
std::unique_ptr<Running> begin(tamp_recording &recording, const at::RecordFunction &fn);
void end(tamp_recording &recording, const at::RecordFunction &fn, Running &running);

// ---------------------------------------------------------------------------------------- insight/recorded_tensors.cpp
// The results that the operator computed, as opposed to views of what it was given.
struct Results {
  std::vector<tamp_recorded_tensor> described;
  std::vector<at::Tensor> computed;
  const torch::autograd::Node *node = nullptr;
};

bool is_finite(const tamp_recorded_tensor &t);
void keep_arguments(Running &running, const at::RecordFunction &fn);
void describe_inputs(tamp_recording &recording, RecordedEvent &event, const Running &running,
                     const at::RecordFunction &fn);
// Counts what an operator has read. What it has overwritten was counted before.
void count_inputs(std::vector<tamp_recorded_tensor> &inputs, const Running &running);
Results describe_results(tamp_recording &recording, const at::RecordFunction &fn, const Running &running,
                         const std::vector<tamp_recorded_tensor> &inputs);

// ------------------------------------------------------------------------------------------------- insight/schemas.cpp
// How an operator uses a tensor that it is given.
uint8_t use_of_input(const c10::FunctionSchema *schema, size_t index);
// Whether an operator has no kernel of its own.
bool is_composite(const c10::OperatorHandle &op);
// Whether the numbers of its result are not there yet.
bool is_uninitialized(std::string_view name);
// Whether it writes a number that the program chose, such as the -inf of a mask.
bool is_filling(std::string_view name);

}  // namespace tamp
