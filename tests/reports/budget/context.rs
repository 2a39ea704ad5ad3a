//! What a model computes with, so that a fault or a harmless change can replace it in the runs in half precision.

use std::cell::RefCell;
use std::collections::HashMap;

use tch::{Device, Kind, Reduction, Tensor};
use tch_amp::Autocast;
use tch_amp::insight::BudgetRun;

use crate::budget::models::{Layer, Model, Norm};
use crate::budget::program::Form;

/// What a program keeps from one iteration to the next.
#[derive(Default)]
pub(crate) struct Store {
    pub(crate) tensors: RefCell<HashMap<String, Tensor>>,
    pub(crate) scale: RefCell<Option<f64>>,
}

pub(crate) struct Context<'a> {
    pub(crate) run: &'a BudgetRun,
    pub(crate) model: &'a Model,
    pub(crate) store: &'a Store,
    /// The name of a fault or of a harmless change.
    pub(crate) change: &'static str,
    pub(crate) form: Form,
    pub(crate) seed: i64,
}

/// Cuts bits off instead of rounding.
fn truncated(x: &Tensor, dtype: Kind) -> Tensor {
    let bits = if dtype == Kind::BFloat16 { 16 } else { 13 };
    x.contiguous().view_dtype(Kind::Int).bitwise_and(-(1i64 << bits)).view_dtype(Kind::Float)
}

/// A value with the gradient of another tensor.
fn passing(value: &Tensor, gradient_of: &Tensor) -> Tensor {
    value.detach() + (gradient_of - gradient_of.detach())
}

/// The sum over the last dimension, with every partial sum rounded.
fn summed_in_half(x: &Tensor) -> Tensor {
    let mut total = x.select(-1, 0).zeros_like();
    for part in x.unbind(-1) {
        total += part;
    }
    total.unsqueeze(-1)
}

impl Context<'_> {
    /// Whether this is a run with this change.
    pub(crate) fn is(&self, change: &str) -> bool {
        self.form.has(self.run) && self.change == change
    }

    fn device(&self) -> Device {
        self.model.vs.device()
    }

    fn dtype(&self) -> Kind {
        self.run.dtype()
    }

    fn off<T>(&self, f: impl FnOnce() -> T) -> T {
        Autocast::new(self.device()).enabled(false).run(f).unwrap()
    }

    pub(crate) fn input(&self, x: &Tensor) -> Tensor {
        if self.is("cast_before_the_mean_is_subtracted") {
            (x + 30.0).to_kind(self.dtype()).to_kind(Kind::Float) - 30.0
        } else if self.is("cast_inputs") {
            x.to_kind(self.dtype())
        } else {
            x.shallow_clone()
        }
    }

    /// The layer in the middle of a model.
    fn middle(&self) -> &'static str {
        match self.model.kind {
            "mlp" => "layers.1",
            "conv" => "c2",
            "lstm" => "hh",
            "encoder" | "gpt" => "0.up",
            "vae" => "d1",
            "wide" => "up",
            _ => "v",
        }
    }

    pub(crate) fn layer(&self, name: &str, layer: &Layer, x: &Tensor) -> Tensor {
        let (w, b) = (&layer.weight, layer.bias.as_ref());
        let apply = |x: &Tensor, w: &Tensor, b: Option<&Tensor>| match layer.stride {
            Some(stride) => x.conv2d(w, b, [stride, stride], [1, 1], [1, 1], 1),
            None => x.linear(w, b),
        };
        let is_middle = name == self.middle();
        let kept = |key: &str| {
            let mut kept = self.store.tensors.borrow_mut();
            kept.entry(key.to_owned())
                .or_insert_with(|| w.detach().to_kind(self.dtype()))
                .shallow_clone()
        };
        if is_middle && self.is("stale_copy_of_one_layer") {
            return apply(x, &passing(&kept("middle"), w), b);
        }
        if self.is("stale_copies_of_all_layers") {
            return apply(x, &passing(&kept(name), w), b);
        }
        if is_middle && self.is("layer_is_detached") {
            return apply(x, &w.detach(), b);
        }
        if is_middle && self.is("bias_is_detached") {
            return apply(x, w, b.map(Tensor::detach).as_ref());
        }
        if is_middle && self.is("one_weight_in_fp8") {
            let low = w.detach().to_kind(Kind::Float8e4m3fn).to_kind(Kind::Float);
            return apply(x, &passing(&low, w), b);
        }
        if self.is("casts_truncate") {
            let x = x.to_kind(Kind::Float);
            let (cut, w) =
                (truncated(&x.detach(), self.dtype()), truncated(&w.detach(), self.dtype()));
            return apply(&passing(&cut, &x), &passing(&w, &layer.weight), b);
        }
        if self.is("products_accumulate_in_half") {
            let (x, w) = (x.to_kind(self.dtype()), w.to_kind(self.dtype()));
            let mut total: Option<Tensor> = None;
            for i in (0..w.size()[1]).step_by(2) {
                let part =
                    x.slice(-1, i, i + 2, 1).linear(&w.slice(1, i, i + 2, 1), None::<&Tensor>);
                total = Some(total.map_or(part.shallow_clone(), |total| total + part));
            }
            return total.unwrap() + b.unwrap().to_kind(self.dtype());
        }
        if is_middle && self.is("one_layer_in_the_other_half") {
            let other = if self.dtype() == Kind::Half { Kind::BFloat16 } else { Kind::Half };
            let b = b.map(|b| b.to_kind(other));
            return self.off(|| {
                apply(&x.to_kind(other), &w.to_kind(other), b.as_ref()).to_kind(self.dtype())
            });
        }
        // Harmless changes.
        if self.is("keep") && name != self.middle() && (name.len() as i64 + self.seed) % 2 == 0 {
            return self.off(|| apply(&x.to_kind(Kind::Float), w, b));
        }
        if self.is("own_copies") {
            let mut kept = self.store.tensors.borrow_mut();
            let fresh = w.detach().to_kind(self.dtype());
            let copy = match kept.get(name) {
                Some(copy) if *copy == fresh => copy.shallow_clone(),
                _ => fresh,
            };
            kept.insert(name.to_owned(), copy.shallow_clone());
            return apply(x, &passing(&copy, w), b);
        }
        if self.is("other_order") && layer.stride.is_none() {
            let half = x.size()[x.dim() - 1] / 2;
            let round = |t: &Tensor| t.to_kind(self.dtype()).to_kind(Kind::Float);
            return self.off(|| {
                let (x, w) = (round(x), round(w));
                let width = 2 * half + x.size()[x.dim() - 1] % 2;
                let first =
                    x.slice(-1, 0, half, 1).linear(&w.slice(1, 0, half, 1), None::<&Tensor>);
                let rest = x
                    .slice(-1, half, width, 1)
                    .linear(&w.slice(1, half, width, 1), b.map(round).as_ref());
                (first + rest).to_kind(self.dtype())
            });
        }
        apply(x, w, b)
    }

    pub(crate) fn layer_norm(&self, norm: &Norm, x: &Tensor) -> Tensor {
        let width = x.size()[x.dim() - 1];
        if self.is("layer_norm_in_half") {
            let x = x.to_kind(self.dtype());
            let mean = summed_in_half(&x) / width;
            let square = summed_in_half(&x.square()) / width;
            let y = (x - &mean) * (square - mean.square() + 1e-5).rsqrt();
            return y * norm.weight.to_kind(self.dtype()) + norm.bias.to_kind(self.dtype());
        }
        let x = if self.is("f32_lists") { x.to_kind(Kind::Float) } else { x.shallow_clone() };
        x.layer_norm([width], Some(&norm.weight), Some(&norm.bias), 1e-5, false)
    }

    pub(crate) fn batch_norm(&self, norm: &Norm, x: &Tensor) -> Tensor {
        let (mean, var) = norm.running.as_ref().unwrap();
        if self.is("batch_norm_statistics_in_half") {
            let x = x.to_kind(self.dtype());
            let m = x.mean_dim([0i64, 2, 3].as_slice(), true, None::<Kind>);
            let v = x.square().mean_dim([0i64, 2, 3].as_slice(), true, None::<Kind>) - m.square();
            let count = (x.numel() as i64 / x.size()[1]) as f64;
            tch::no_grad(|| {
                let into = |running: &Tensor, new: &Tensor| {
                    let _done = running
                        .shallow_clone()
                        .lerp_(&new.flatten(0, -1).to_kind(Kind::Float), 0.1);
                };
                into(mean, &m);
                into(var, &(&v * (count / (count - 1.0))));
            });
            let y = (x - &m) * (v + 1e-5).rsqrt();
            let shape = |t: &Tensor| t.view([-1, 1, 1]).to_kind(self.dtype());
            return y * shape(&norm.weight) + shape(&norm.bias);
        }
        let (w, b) = (Some(&norm.weight), Some(&norm.bias));
        x.batch_norm(w, b, Some(mean), Some(var), true, 0.1, 1e-5, true)
    }

    pub(crate) fn residual(&self, name: &str, x: &Tensor, y: &Tensor) -> Tensor {
        if self.is("branch_is_detached") && (name == "r" || name == "0.r2") {
            x + y.detach()
        } else if self.is("cast_inputs") {
            x.to_kind(Kind::Float) + y.to_kind(Kind::Float)
        } else {
            x + y
        }
    }

    pub(crate) fn pool(&self, x: &Tensor) -> Tensor {
        if self.is("mean_over_pixels_in_half") {
            let x = x.to_kind(self.dtype()).flatten(2, -1);
            return summed_in_half(&x).squeeze_dim(-1) / x.size()[2];
        }
        x.mean_dim([2i64, 3].as_slice(), false, None::<Kind>)
    }

    pub(crate) fn softmax(&self, x: &Tensor) -> Tensor {
        if self.is("softmax_sums_in_half") {
            let x = x.to_kind(self.dtype());
            let e = (&x - x.amax([-1i64].as_slice(), true)).exp();
            return &e / summed_in_half(&e);
        }
        if self.is("softmax_returns_half") {
            return x.to_kind(Kind::Float).softmax(-1, None::<Kind>).to_kind(self.dtype());
        }
        let x = if self.is("f32_lists") { x.to_kind(Kind::Float) } else { x.shallow_clone() };
        x.softmax(-1, None::<Kind>)
    }

    pub(crate) fn dropout(&self, x: &Tensor) -> Tensor {
        if self.is("dropout_is_off") { x.shallow_clone() } else { x.dropout(0.1, true) }
    }

    pub(crate) fn attention(&self, q: &Tensor, k: &Tensor, v: &Tensor) -> Tensor {
        let scale = self.is("attention_without_its_scale").then_some(1.0);
        Tensor::scaled_dot_product_attention(q, k, v, None::<&Tensor>, 0.0, true, scale, false)
    }

    pub(crate) fn positions(&self, length: i64, width: i64) -> Tensor {
        let kind = if self.is("positions_in_half") { self.dtype() } else { Kind::Float };
        let places = Tensor::arange(length, (kind, self.device())).unsqueeze(1);
        let exponents =
            Tensor::arange_start_step(0, width, 2, (Kind::Float, self.device())) / width;
        let rates = (exponents * 100f64.ln()).exp().to_kind(kind);
        let angle = places / rates;
        Tensor::cat(&[angle.sin(), angle.cos()], 1)
    }

    pub(crate) fn tied_head(&self, x: &Tensor, table: &Tensor) -> Tensor {
        if self.is("tied_head_is_detached") {
            return x.linear(&table.detach(), None::<&Tensor>);
        }
        x.linear(table, None::<&Tensor>)
    }

    pub(crate) fn sample(&self, mu: &Tensor, logvar: &Tensor, noise: &Tensor) -> Tensor {
        let logvar =
            if self.is("f32_lists") { logvar.to_kind(Kind::Float) } else { logvar.shallow_clone() };
        mu + noise * (logvar * 0.5).exp()
    }

    pub(crate) fn cross_entropy(&self, x: &Tensor, y: &Tensor) -> Tensor {
        if self.is("log_of_softmax_in_half") {
            let log = x.to_kind(self.dtype()).softmax(-1, None::<Kind>).log();
            return log.nll_loss(y);
        }
        if self.is("loss_is_summed_in_half") {
            let each = x.cross_entropy_loss(y, None::<&Tensor>, Reduction::None, -100, 0.0);
            let each = each.to_kind(self.dtype());
            return summed_in_half(&each).squeeze() / each.size()[0];
        }
        let x = if self.is("f32_lists") { x.to_kind(Kind::Float) } else { x.shallow_clone() };
        x.cross_entropy_for_logits(y)
    }

    pub(crate) fn mse(&self, x: &Tensor, y: &Tensor) -> Tensor {
        x.mse_loss(y, Reduction::Mean)
    }

    pub(crate) fn reconstruction(&self, logits: &Tensor, x: &Tensor) -> Tensor {
        let batch = x.size()[0];
        if self.is("log_of_sigmoid_in_half") {
            let p = logits.to_kind(self.dtype()).sigmoid();
            let x = x.to_kind(self.dtype());
            let one = |t: &Tensor| -t + 1.0;
            return -((&x * p.log() + one(&x) * one(&p).log()).sum(None::<Kind>)) / batch;
        }
        let logits =
            if self.is("f32_lists") { logits.to_kind(Kind::Float) } else { logits.shallow_clone() };
        // By hand: autocast's list has the loss in f32.
        let positive = logits.clamp_min(0.0) - &logits * x;
        (positive + (-logits.abs()).exp().log1p()).sum(None::<Kind>) / batch
    }

    pub(crate) fn divergence(&self, mu: &Tensor, logvar: &Tensor) -> Tensor {
        let wide = |t: &Tensor| {
            if self.is("f32_lists") { t.to_kind(Kind::Float) } else { t.shallow_clone() }
        };
        let (mu, logvar) = (wide(mu), wide(logvar));
        let sum = (&logvar + 1.0 - mu.square() - logvar.exp()).sum(None::<Kind>);
        sum * (-0.5 / mu.size()[0] as f64)
    }
}
