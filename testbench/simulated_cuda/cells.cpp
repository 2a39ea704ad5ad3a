#include "cells.h"

#include <ATen/ATen.h>

#include <vector>

namespace simulated {
namespace {

using at::Tensor;

// Half numbers are computed in f32, as on CUDA.
Tensor wide(const Tensor &t) { return is_half(t.scalar_type()) ? t.to(at::kFloat) : t; }

Tensor argument(const Call &call, size_t index) {
  const auto &value = call.stack[call.first + index];
  return value.isTensor() ? value.toTensor() : Tensor();
}

// An argument, or zeros like `like` where there is none.
Tensor or_zeros(const Tensor &t, const Tensor &like) { return t.defined() ? wide(t) : at::zeros_like(like); }

void give(const Call &call, const std::vector<Tensor> &results) {
  call.stack.resize(call.first);
  for (const Tensor &t : results) call.stack.emplace_back(t);
}

Tensor slope_of_sigmoid(const Tensor &y) { return y * (1 - y); }
Tensor slope_of_tanh(const Tensor &y) { return 1 - y * y; }

// The sums over the batch are the gradients of the biases.
Tensor bias_gradient(const Tensor &gates, bool has_bias) { return has_bias ? gates.sum(0) : Tensor(); }

// input_gates, hidden_gates, cx, input_bias, hidden_bias -> hy, cy, and the gates for backward.
void lstm(const Call &call) {
  const Tensor cx = argument(call, 2), input_bias = argument(call, 3), hidden_bias = argument(call, 4);
  Tensor gates = wide(argument(call, 0)) + wide(argument(call, 1));
  if (input_bias.defined()) gates = gates + wide(input_bias) + wide(hidden_bias);
  const auto parts = gates.chunk(4, 1);
  const Tensor in = parts[0].sigmoid(), forget = parts[1].sigmoid(), cell = parts[2].tanh(), out = parts[3].sigmoid();
  const Tensor cy = forget * wide(cx) + in * cell;
  const auto dtype = cx.scalar_type();
  give(call, {(out * cy.tanh()).to(dtype), cy.to(dtype), at::cat({in, forget, cell, out}, 1).to(dtype)});
}

// grad_hy, grad_cy, cx, cy, workspace, has_bias -> gradients of the gates, of cx and of the biases.
void lstm_backward(const Call &call) {
  if (!argument(call, 0).defined() && !argument(call, 1).defined()) {
    give(call, {Tensor(), Tensor(), Tensor()});
    return;
  }
  const bool has_bias = call.stack[call.first + 5].toBool();
  const Tensor cx = wide(argument(call, 2)), tanh_cy = at::tanh(wide(argument(call, 3)));
  const Tensor grad_hy = or_zeros(argument(call, 0), cx), grad_cy = or_zeros(argument(call, 1), cx);
  const auto parts = wide(argument(call, 4)).chunk(4, 1);
  const Tensor &in = parts[0], &forget = parts[1], &cell = parts[2], &out = parts[3];
  const Tensor through = grad_hy * out * slope_of_tanh(tanh_cy) + grad_cy;
  const Tensor gates = at::cat({through * cell * slope_of_sigmoid(in), through * cx * slope_of_sigmoid(forget),
                                through * in * slope_of_tanh(cell), grad_hy * tanh_cy * slope_of_sigmoid(out)},
                               1)
                           .to(argument(call, 4).scalar_type());
  give(call, {gates, (through * forget).to(argument(call, 2).scalar_type()), bias_gradient(gates, has_bias)});
}

// input_gates, hidden_gates, hx, input_bias, hidden_bias -> hy, and what backward needs.
void gru(const Call &call) {
  const Tensor hx = wide(argument(call, 2)), input_bias = argument(call, 3), hidden_bias = argument(call, 4);
  Tensor input = wide(argument(call, 0)), hidden = wide(argument(call, 1));
  if (input_bias.defined()) {
    input = input + wide(input_bias);
    hidden = hidden + wide(hidden_bias);
  }
  const auto inputs = input.chunk(3, 1), hiddens = hidden.chunk(3, 1);
  const Tensor reset = (inputs[0] + hiddens[0]).sigmoid(), update = (inputs[1] + hiddens[1]).sigmoid();
  const Tensor fresh = (inputs[2] + reset * hiddens[2]).tanh();
  const auto dtype = argument(call, 2).scalar_type();
  const Tensor kept = at::cat({reset, update, fresh, hx, hiddens[2]}, 1);
  give(call, {(fresh + update * (hx - fresh)).to(dtype), kept.to(dtype)});
}

// grad_hy, workspace, has_bias -> gradients of the input's gates, the hidden's, hx, and both biases.
void gru_backward(const Call &call) {
  const bool has_bias = call.stack[call.first + 2].toBool();
  const Tensor grad = wide(argument(call, 0));
  const auto dtype = argument(call, 1).scalar_type();
  const auto parts = wide(argument(call, 1)).chunk(5, 1);
  const Tensor &reset = parts[0], &update = parts[1], &fresh = parts[2], &hx = parts[3], &hidden = parts[4];
  const Tensor to_update = grad * (hx - fresh) * slope_of_sigmoid(update);
  const Tensor to_fresh = grad * (1 - update) * slope_of_tanh(fresh);
  const Tensor to_reset = to_fresh * hidden * slope_of_sigmoid(reset);
  const Tensor input = at::cat({to_reset, to_update, to_fresh}, 1).to(dtype);
  const Tensor hiddens = at::cat({to_reset, to_update, to_fresh * reset}, 1).to(dtype);
  give(call,
       {input, hiddens, (grad * update).to(dtype), bias_gradient(input, has_bias), bias_gradient(hiddens, has_bias)});
}

}  // namespace

bool compute_cell(const Call &call) {
  if (call.name == "_thnn_fused_lstm_cell") return lstm(call), true;
  if (call.name == "_thnn_fused_lstm_cell_backward_impl") return lstm_backward(call), true;
  if (call.name == "_thnn_fused_gru_cell") return gru(call), true;
  if (call.name == "_thnn_fused_gru_cell_backward") return gru_backward(call), true;
  return false;
}

}  // namespace simulated
