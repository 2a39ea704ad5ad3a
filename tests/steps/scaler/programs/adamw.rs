//! AdamW with the operations of Python's `torch.optim.AdamW(foreach=False)`, in the same order.
//!
//! libtorch's C++ AdamW, which tch uses, rounds differently (it has `mul_` and `add_` where Python has `lerp_`), so a
//! bitwise comparison of parameters needs this implementation. tch does not bind the `value` of `addcmul_` and
//! `addcdiv_`, by which their kernels multiply the first factor. Multiplying beforehand gives the same in f32 and f64,
//! but not in bf16, where the kernel does not round in between.

use tch::{Kind, Tensor, no_grad};
use tch_amp::Result;
use tch_amp::optim::{AmpOptimizer, Parameters, Step};

#[derive(Debug)]
pub struct AdamW {
    lr: f64,
    beta1: f64,
    beta2: f64,
    weight_decay: f64,
    params: Vec<Tensor>,
    states: Vec<Option<State>>,
}

#[derive(Debug)]
struct State {
    steps: i32,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
}

impl AdamW {
    pub fn new(params: Vec<Tensor>, lr: f64, beta1: f64, beta2: f64, weight_decay: f64) -> Self {
        let states = params.iter().map(|_| None).collect();
        Self { lr, beta1, beta2, weight_decay, params, states }
    }

    fn step_one(&mut self, index: usize) {
        let mut param = self.params[index].detach();
        let grad = self.params[index].grad();
        if !grad.defined() {
            return;
        }
        let state = self.states[index].get_or_insert_with(|| State {
            steps: 0,
            exp_avg: grad.zeros_like(),
            exp_avg_sq: grad.zeros_like(),
        });
        state.steps += 1;
        assert_ne!(param.kind(), Kind::BFloat16);
        if self.weight_decay != 0.0 {
            let _param = param.g_mul_scalar_(1.0 - self.lr * self.weight_decay);
        }
        let _average = state.exp_avg.lerp_(&grad, 1.0 - self.beta1);
        let scaled = &grad * (1.0 - self.beta2);
        let _average = state.exp_avg_sq.g_mul_scalar_(self.beta2).addcmul_(&scaled, &grad);
        let correction1 = 1.0 - self.beta1.powf(f64::from(state.steps));
        let correction2 = 1.0 - self.beta2.powf(f64::from(state.steps));
        let step_size = self.lr / correction1;
        let denominator = (state.exp_avg_sq.sqrt() / correction2.sqrt()).g_add_scalar_(1e-8);
        let _param = param.addcdiv_(&(&state.exp_avg * -step_size), &denominator);
    }
}

impl AmpOptimizer for AdamW {
    fn parameters(&self) -> Parameters<'_> {
        self.params.as_slice().into()
    }

    fn update(&mut self, _step: &Step<'_>) -> Result<()> {
        no_grad(|| (0..self.params.len()).for_each(|index| self.step_one(index)));
        Ok(())
    }
}
