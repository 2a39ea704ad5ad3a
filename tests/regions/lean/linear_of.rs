//! Linear layers of an activation or a normalization, beside the two operators.

use tch::{Device, Kind, Tensor, no_grad};
use tch_amp::lean::{Activation, NormConfig, NormKind, activation_linear, norm_linear};
use tch_amp::memory::peak_during;
use tch_amp::recompute::checkpointed;
use tch_amp::{Autocast, Error};

use testkit::assert_says;
use testkit::bits::bits;
use testkit::rng::Rng;

use super::{assert_near, assert_same_bits, assert_skipped, refusal, region, relative};

/// What is in front of the linear layer.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Front {
    Activation(Activation),
    Norm(NormKind, &'static [i64]),
}

const FRONTS: [Front; 7] = [
    Front::Activation(Activation::Gelu),
    Front::Activation(Activation::GeluTanh),
    Front::Activation(Activation::Silu),
    Front::Activation(Activation::SwiGlu),
    Front::Norm(NormKind::Layer, &[WIDTH]),
    Front::Norm(NormKind::Layer, &[5, WIDTH]),
    Front::Norm(NormKind::Rms, &[WIDTH]),
];

const WIDTH: i64 = 12;
const EPS: f64 = 1e-3;

/// A layer: its input, the weight and the bias of the normalization, and those of the linear layer. Without a bias, its
/// normalization has no weight either.
struct Layer {
    front: Front,
    leaves: [Option<Tensor>; 5],
}

impl Layer {
    fn new(front: Front, device: Device, has_bias: bool) -> Self {
        let mut rng = Rng::new(11);
        let mut tensor = |size: &[i64], offset: f64| {
            let count = size.iter().product::<i64>();
            let values: Vec<f64> = (0..count)
                .map(|_| offset + (rng.below(20_001) as f64 / 10_000.0 - 1.0) * 1.7)
                .collect();
            Tensor::from_slice(&values).view(size).to_kind(Kind::Float).to_device(device)
        };
        let wide = front == Front::Activation(Activation::SwiGlu);
        let xs = tensor(&[3, 5, if wide { 2 * WIDTH } else { WIDTH }], 0.2);
        let [norm_weight, norm_bias] = match front {
            Front::Activation(_) => [None, None],
            Front::Norm(kind, shape) => {
                let has_norm_bias = has_bias && kind == NormKind::Layer;
                let weight = has_bias.then(|| tensor(shape, 1.0));
                [weight, has_norm_bias.then(|| tensor(shape, 0.0))]
            }
        };
        let bias = has_bias.then(|| tensor(&[7], 0.0));
        let weight = Some(tensor(&[7, WIDTH], 0.0));
        Self { front, leaves: [Some(xs), norm_weight, norm_bias, weight, bias] }
    }

    /// Leaves of their own with the same numbers, of which the input has a dtype.
    fn leaves(&self, input: Kind, others: Kind) -> Self {
        let leaf = |(place, leaf): (usize, &Option<Tensor>)| {
            let kind = if place == 0 { input } else { others };
            let copy = |t: &Tensor| t.detach().to_kind(kind).copy().set_requires_grad(true);
            leaf.as_ref().map(copy)
        };
        let mut leaves = self.leaves.iter().enumerate().map(leaf);
        Self { front: self.front, leaves: std::array::from_fn(|_| leaves.next().unwrap()) }
    }

    fn xs(&self) -> &Tensor {
        self.leaves[0].as_ref().unwrap()
    }

    fn lean(&self, xs: &Tensor) -> Result<Tensor, Error> {
        let [_, norm_weight, norm_bias, weight, bias] = self.leaves.each_ref().map(Option::as_ref);
        let weight = weight.unwrap();
        match self.front {
            Front::Activation(activation) => activation_linear(xs, activation, weight, bias),
            Front::Norm(kind, shape) => {
                let config = NormConfig { kind, normalized_shape: shape.to_vec(), eps: EPS };
                norm_linear(xs, &config, norm_weight, norm_bias, weight, bias)
            }
        }
    }

    fn usual(&self, xs: &Tensor) -> Tensor {
        let [_, norm_weight, norm_bias, weight, bias] = self.leaves.each_ref().map(Option::as_ref);
        let input = match self.front {
            Front::Activation(Activation::Gelu) => xs.gelu("none"),
            Front::Activation(Activation::GeluTanh) => xs.gelu("tanh"),
            Front::Activation(Activation::Silu) => xs.silu(),
            Front::Activation(Activation::SwiGlu) => {
                let half = xs.chunk(2, -1);
                half[0].silu() * &half[1]
            }
            Front::Norm(NormKind::Layer, shape) => {
                xs.layer_norm(shape, norm_weight, norm_bias, EPS, true)
            }
            Front::Norm(NormKind::Rms, shape) => xs.rms_norm(shape, norm_weight, EPS),
        };
        input.linear(weight.unwrap(), bias)
    }

    /// Whether the backward pass consists of the kernels that autograd calls.
    fn has_autograds_kernels(&self) -> bool {
        !matches!(self.front, Front::Norm(NormKind::Rms, _))
    }

    fn gradients(&self) -> Vec<Tensor> {
        self.leaves.iter().flatten().map(Tensor::grad).collect()
    }
}

/// A number that depends on each output by another factor.
fn sum(ys: &Tensor) -> Tensor {
    let wide = if ys.kind() == Kind::Double { Kind::Double } else { Kind::Float };
    let count = i64::try_from(ys.numel()).unwrap();
    let factors = Tensor::arange(count, (wide, ys.device())).remainder(17.0) - 7.5;
    (ys.to_kind(wide).view(-1) * factors).sum(wide)
}

/// The result and the gradients of the leaves, by a function of the input.
fn run(
    layer: &Layer,
    region: &Autocast,
    call: impl Fn(&Layer, &Tensor) -> Tensor,
) -> (Tensor, Vec<Tensor>) {
    let ys = region.run(|| call(layer, layer.xs())).unwrap();
    sum(&ys).backward();
    (ys.detach(), layer.gradients())
}

fn lean(layer: &Layer, xs: &Tensor) -> Tensor {
    layer.lean(xs).unwrap()
}

fn assert_same(layer: &Layer, ours: &[Tensor], theirs: &[Tensor], what: &str) {
    assert_eq!(ours.len(), theirs.len());
    for (place, (ours, theirs)) in ours.iter().zip(theirs).enumerate() {
        assert_eq!((ours.kind(), ours.size()), (theirs.kind(), theirs.size()), "{what}: {place}");
        if layer.has_autograds_kernels() {
            assert_eq!(bits(ours), bits(theirs), "{what}: gradient {place}");
        } else {
            // In half precision every rounding may fall the other way.
            let most = if what.contains("no region") { 1e-6 } else { 1e-2 };
            assert!(relative(ours, theirs) <= most, "{what}: gradient {place}: {ours} {theirs}");
        }
    }
}

/// The regions of a device: each dtype, with each of the operators in f32 and in half precision.
fn regions(device: Device) -> Vec<(String, Autocast)> {
    let mut regions = vec![("no region".to_owned(), region(device, Kind::Float))];
    for kind in [Kind::BFloat16, Kind::Half] {
        let plain = region(device, kind);
        regions.push((format!("{kind:?}"), plain));
        if kind == Kind::Half {
            continue;
        }
        for name in ["linear", "gelu", "silu", "mul", "layer_norm", "native_layer_norm", "rms_norm"]
        {
            regions.push((format!("{name} in f32"), plain.keep_in_f32([name])));
            regions.push((format!("{name} in half"), plain.prefer_half([name])));
        }
    }
    regions
}

#[test]
fn numbers_are_those_of_the_two_operators_in_every_region() {
    testkit::for_each_device(|device| {
        for (name, region) in regions(device) {
            for front in FRONTS {
                // libtorch composes an RMSNorm of products on the CPU; an override holds for the operator that it
                // names.
                if name == "mul in half" && front == Front::Norm(NormKind::Rms, &[WIDTH]) {
                    continue;
                }
                for has_bias in [true, false] {
                    let layer = Layer::new(front, device, has_bias);
                    let is_region = name != "no region";
                    let inputs =
                        if is_region { &[Kind::Float, Kind::BFloat16][..] } else { &[Kind::Float] };
                    for &input in inputs {
                        let what = format!("{device:?} {front:?} of {input:?}, {name}, {has_bias}");
                        let [ours, theirs] = [0, 1].map(|_| layer.leaves(input, Kind::Float));
                        let (ours_out, ours_grads) = run(&ours, &region, lean);
                        let (out, grads) = run(&theirs, &region, Layer::usual);
                        assert_eq!(ours_out.kind(), out.kind(), "{what}");
                        assert_eq!(bits(&ours_out), bits(&out), "{what}");
                        assert_same(&layer, &ours_grads, &grads, &what);
                    }
                }
            }
        }
    });
}

/// An RMSNorm's gradients differ from autograd's by rounding, and their errors are at most 1.05 times as large.
#[test]
fn errors_are_those_of_autocast_or_smaller() {
    testkit::for_each_device(|device| {
        let shape: &[i64] = &[48];
        let mut rng = Rng::new(5);
        let mut tensor = |size: &[i64]| {
            let count = size.iter().product::<i64>();
            let values: Vec<f64> =
                (0..count).map(|_| rng.below(20_001) as f64 / 10_000.0 - 1.0).collect();
            Tensor::from_slice(&values).view(size).to_kind(Kind::Float).to_device(device)
        };
        let leaves = [
            Some(tensor(&[20, 20, 48])),
            Some(tensor(&[48]) + 1.0),
            None,
            Some(tensor(&[32, 48])),
            None,
        ];
        let layer = Layer { front: Front::Norm(NormKind::Rms, shape), leaves };
        let exact = layer.leaves(Kind::Double, Kind::Double);
        sum(&exact.usual(exact.xs())).backward();
        for kind in [Kind::Float, Kind::BFloat16, Kind::Half] {
            let own = |call: fn(&Layer, &Tensor) -> Tensor| {
                run(&layer.leaves(Kind::Float, Kind::Float), &region(device, kind), call).1
            };
            let (ours, theirs) = (own(lean), own(Layer::usual));
            for (place, exact) in exact.gradients().iter().enumerate() {
                let [ours, theirs] = [&ours[place], &theirs[place]].map(|g| relative(g, exact));
                assert!(ours <= (theirs * 1.05).max(1e-6), "{kind:?} {place}: {ours}, {theirs}");
            }
        }
    });
}

#[test]
fn f64_and_half_operands_without_a_region_are_computed_in_their_dtype() {
    testkit::for_each_device(|device| {
        for front in FRONTS {
            for kind in [Kind::Double, Kind::BFloat16] {
                let layer = Layer::new(front, device, true);
                let [ours, theirs] = [0, 1].map(|_| layer.leaves(kind, kind));
                let none = region(device, Kind::Float);
                let (ours_out, ours_grads) = run(&ours, &none, lean);
                let (out, grads) = run(&theirs, &none, Layer::usual);
                assert_eq!((ours_out.kind(), bits(&ours_out)), (kind, bits(&out)));
                assert_same(&layer, &ours_grads, &grads, &format!("{front:?} of {kind:?}"));
            }
        }
    });
}

/// An input of any layout, without rows, or frozen like any other operand.
#[test]
fn inputs_of_all_layouts_and_frozen_operands() {
    let half = region(Device::Cpu, Kind::BFloat16);
    for front in FRONTS {
        let layer = Layer::new(front, Device::Cpu, true);
        for frozen in 0..5 {
            let [ours, theirs] = [0, 1].map(|_| {
                let leaves = layer.leaves(Kind::Float, Kind::Float);
                if let Some(leaf) = &leaves.leaves[frozen] {
                    let _frozen = leaf.set_requires_grad(false);
                }
                leaves
            });
            let gradients = |layer: &Layer, call: fn(&Layer, &Tensor) -> Tensor| {
                // Neither contiguous nor a leaf.
                let spread = Tensor::stack(&[layer.xs(), layer.xs()], 0).transpose(0, 2);
                let xs = spread.transpose(1, 2).select(1, 0).transpose(0, 1);
                sum(&half.run(|| call(layer, &xs)).unwrap()).backward();
                layer.gradients()
            };
            let (ours, theirs) = (gradients(&ours, lean), gradients(&theirs, Layer::usual));
            for (place, (ours, theirs)) in ours.iter().zip(&theirs).enumerate() {
                assert_eq!(ours.defined(), theirs.defined(), "{front:?} {place}");
                if ours.defined() {
                    let apart = relative(ours, theirs);
                    assert!(apart < 1e-3, "{front:?} {frozen} {place}: {apart}");
                }
            }
        }
        let layer = layer.leaves(Kind::Float, Kind::Float);
        let ys = half.run(|| lean(&layer, &layer.xs().narrow(0, 0, 0))).unwrap();
        assert_eq!(ys.size(), [0, 5, 7]);
        ys.sum(Kind::Float).backward();
        let weight = layer.leaves[3].as_ref().unwrap().grad();
        assert_eq!(weight.abs().sum(Kind::Float).double_value(&[]), 0.0);
    }
}

/// Second derivatives are those of the operators.
#[test]
fn gradients_can_be_differentiated_again() {
    for front in FRONTS {
        let layer = Layer::new(front, Device::Cpu, true);
        let second = |call: fn(&Layer, &Tensor) -> Tensor| {
            let own = layer.leaves(Kind::Float, Kind::Float);
            let loss = sum(&call(&own, own.xs()).square());
            let leaves: Vec<&Tensor> = own.leaves.iter().flatten().collect();
            let first = Tensor::run_backward(&[loss], &leaves, true, true);
            first.iter().map(|g| g.square().sum(Kind::Float)).sum::<Tensor>().backward();
            own.gradients()
        };
        assert_near(&second(lean), &second(Layer::usual), 1e-5, &format!("{front:?}"));
    }
}

#[test]
fn a_second_pass_has_the_bits_of_the_first_and_a_third_one_is_refused() {
    for front in FRONTS {
        let own = Layer::new(front, Device::Cpu, true).leaves(Kind::Float, Kind::Float);
        let leaves: Vec<&Tensor> = own.leaves.iter().flatten().collect();
        let loss = sum(&region(Device::Cpu, Kind::BFloat16).run(|| lean(&own, own.xs())).unwrap());
        let pass = |keep| Tensor::f_run_backward(&[&loss], &leaves, keep, false);
        let (first, second) = (pass(true).unwrap(), pass(false).unwrap());
        assert_same_bits(&first, &second, &format!("{front:?}"));
        assert_says(pass(false).map(drop), "backward through the graph a second time");
    }
}

#[test]
fn changes_in_place_are_noticed_in_operands_and_allowed_in_the_result() {
    for front in FRONTS {
        for place in [0, 1, 3] {
            let own = Layer::new(front, Device::Cpu, true).leaves(Kind::Float, Kind::Float);
            let Some(leaf) = &own.leaves[place] else { continue };
            let loss = sum(&lean(&own, own.xs()));
            drop(no_grad(|| leaf.shallow_clone().fill_(0.0)));
            assert_says(loss.f_backward(), "modified by an inplace operation");
        }
        let own = Layer::new(front, Device::Cpu, true).leaves(Kind::Float, Kind::Float);
        let mut ys = lean(&own, own.xs());
        let _changed = ys.g_mul_scalar_(2.0);
        sum(&ys).backward();
        assert!(own.gradients().iter().all(Tensor::defined));
    }
}

#[test]
fn without_gradients_nothing_is_recorded() {
    for front in FRONTS {
        let own = Layer::new(front, Device::Cpu, true).leaves(Kind::Float, Kind::Float);
        let ys = no_grad(|| lean(&own, own.xs()));
        assert!(!ys.requires_grad());
        assert_eq!(bits(&ys), bits(&no_grad(|| own.usual(own.xs()))));
    }
}

#[test]
fn a_recomputed_layer_has_the_same_bits() {
    testkit::for_each_device(|device| {
        for front in FRONTS {
            let layer = Layer::new(front, device, true);
            let [ours, theirs] = [0, 1].map(|_| layer.leaves(Kind::Float, Kind::Float));
            let half = region(device, Kind::BFloat16);
            let (_, grads) = run(&ours, &half, lean);
            let (_, again) = run(&theirs, &half, |layer, xs| {
                let leaves = layer.leaves.each_ref().map(|t| t.as_ref().map(Tensor::shallow_clone));
                let inside = Layer { front, leaves };
                checkpointed(&[xs], move |x| Ok(inside.lean(x[0])?)).unwrap()
            });
            assert_same_bits(&again, &grads, &format!("{device:?} {front:?}"));
        }
    });
}

/// A gradient that overflows in fp16 skips the step.
#[test]
fn an_overflow_skips_the_step() {
    testkit::for_each_device(|device| {
        for front in FRONTS {
            let own = Layer::new(front, device, true).leaves(Kind::Float, Kind::Float);
            let weight = own.leaves[3].as_ref().unwrap();
            let ys = region(device, Kind::Half).run(|| lean(&own, own.xs())).unwrap();
            assert_skipped(&(sum(&ys) * 1e6), weight, &format!("{front:?}"));
        }
    });
}

/// A stack of layers keeps their inputs, and half of what the two operators keep.
#[test]
fn half_of_what_the_operators_keep_is_kept() {
    const LAYERS: u64 = 24;
    let (rows, width) = (512, 64);
    for front in FRONTS {
        let (Front::Activation(_) | Front::Norm(_, [WIDTH])) = front else { continue };
        let kind = (Kind::BFloat16, Device::Cpu);
        let ones = |size: &[i64]| (Tensor::ones(size, kind) * 0.01).set_requires_grad(true);
        let input = if front == Front::Activation(Activation::SwiGlu) { 2 * width } else { width };
        let front = match front {
            Front::Norm(kind, _) => Front::Norm(kind, &[64]),
            other => other,
        };
        let norm = matches!(front, Front::Norm(..)).then(|| ones(&[width]));
        let weight = Some(ones(&[input, width]));
        let layer = Layer { front, leaves: [Some(ones(&[rows, input])), norm, None, weight, None] };
        let peak = |call: fn(&Layer, &Tensor) -> Tensor| {
            let forward = || {
                let mut ys = layer.xs().shallow_clone();
                for _ in 0..LAYERS {
                    ys = call(&layer, &ys);
                }
                ys
            };
            peak_during(forward).unwrap().1
        };
        let (ours, theirs) = (peak(lean), peak(Layer::usual));
        println!("{front:?}: {ours} bytes, {theirs} with the operators");
        let of_inputs = LAYERS * u64::try_from(rows * input * 2).unwrap();
        assert!(ours <= of_inputs * 13 / 10, "{front:?}: {ours} for {of_inputs} of inputs");
        assert!(ours <= theirs * 65 / 100, "{front:?}: {ours} of {theirs}");
    }
}

#[test]
fn arguments_that_do_not_fit_are_refused_by_name() {
    let floats = |size: &[i64]| Tensor::ones(size, (Kind::Float, Device::Cpu));
    let (xs, w) = (floats(&[3, 6]), floats(&[4, 6]));
    let activation = |xs: &Tensor, activation, weight: &Tensor, bias: Option<&Tensor>| {
        activation_linear(xs, activation, weight, bias)
    };
    let norm = |config: &NormConfig, weight: Option<&Tensor>, bias: Option<&Tensor>| {
        norm_linear(&xs, config, weight, bias, &w, None)
    };
    let layer = NormConfig::layer(&[6]);
    let eps = |eps| NormConfig { eps, ..layer.clone() };
    let (five, gelu) = (floats(&[5]), Activation::Gelu);
    for (result, start) in [
        (activation(&xs.to_kind(Kind::Int), gelu, &w, None), "xs must be a floating-point tensor"),
        (activation(&floats(&[]), gelu, &w, None), "xs must have a last dimension"),
        (activation(&floats(&[3, 7]), Activation::SwiGlu, &w, None), "xs must have an even last"),
        (activation(&xs, Activation::SwiGlu, &w, None), "weight must have the shape [outputs, 3]"),
        (activation(&xs, gelu, &w.tr(), None), "weight must have the shape [outputs, 6]"),
        (activation(&xs, gelu, &w, Some(&five)), "bias must have the shape [4]"),
        (activation(&xs, gelu, &w.to_kind(Kind::Half), None), "weight is Half, and xs Float"),
        (activation(&xs, gelu, &Tensor::new(), None), "weight must be a dense tensor"),
        (norm(&NormConfig::layer(&[]), None, None), "normalized_shape must be the last dimensions"),
        (norm(&NormConfig::layer(&[5]), None, None), "normalized_shape must be the last"),
        (norm(&NormConfig::layer(&[2, 3, 6]), None, None), "normalized_shape must be the last"),
        (norm(&layer, Some(&five), None), "norm_weight must have the shape [6]"),
        (norm(&layer, None, Some(&five)), "norm_bias must have the shape [6]"),
        (norm(&NormConfig::rms(&[6], 1e-6), None, Some(&five)), "norm_bias must be None"),
        (norm(&layer, Some(&floats(&[6]).to_kind(Kind::Double)), None), "norm_weight is Double"),
        (norm(&layer, Some(&floats(&[6]).to_kind(Kind::Half)), None), "norm_weight is Half"),
        (norm(&eps(-1.0), None, None), "eps must be finite"),
        (norm(&eps(f64::NAN), None, None), "eps must be finite"),
    ] {
        let said = refusal(result);
        assert!(said.starts_with(start), "{said}");
    }
}
