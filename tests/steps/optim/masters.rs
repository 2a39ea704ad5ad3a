//! Half-precision parameters that are updated in f32. The reference is the optimizer itself with f32 parameters, which
//! `programs/` compares with PyTorch bit by bit.

use tch::{Device, Kind, Tensor};
use tch_amp::GradScaler;
use tch_amp::optim::{
    Adam, AdamW, Algorithm, MasterWeights, MomentDtype, Optimizer, OptimizerState, Sgd,
};

use crate::optim::{algorithms, load_with, low_bit, one, to_f64};
use testkit::bits::bits;
use testkit::for_each_device;
use testkit::optimizers::{MASTERS, scaler, state_bits};

const SIZES: [&[i64]; 5] = [&[], &[7], &[65, 1039], &[5, 4], &[0]];

fn build(algorithm: Algorithm, parameters: &[Tensor], masters: MasterWeights) -> Optimizer {
    algorithm.master_weights(masters).build(parameters, 0.01).unwrap()
}

/// Each algorithm, and with low-bit moments those that can have them.
fn with_moments() -> impl Iterator<Item = (Algorithm, MomentDtype)> {
    let all = algorithms().into_iter().map(|algorithm| (algorithm, MomentDtype::F32));
    all.chain(low_bit::cases())
}

fn without_masters(state: &OptimizerState) -> Vec<(String, Vec<u8>)> {
    let all = state_bits(state).into_iter();
    all.filter(|(name, _)| !name.starts_with("master_param")).collect()
}

fn leaf(values: &Tensor) -> Tensor {
    values.detach().copy().set_requires_grad(true)
}

/// Random half-precision parameters, one of them transposed.
fn halves(kind: Kind, device: Device) -> Vec<Tensor> {
    let random = |size: &&[i64]| Tensor::randn(*size, (Kind::Float, device)).to_kind(kind);
    let mut all: Vec<_> = SIZES.iter().map(random).collect();
    let transposed = all[3].tr().contiguous().tr();
    all[3] = transposed;
    all.iter().map(leaf).collect()
}

/// Gives each parameter its gradient by a backward of its own.
fn backward(parameters: &[Tensor], gradients: &[Tensor]) {
    for (parameter, gradient) in parameters.iter().zip(gradients) {
        (parameter * gradient.to_kind(parameter.kind())).sum(parameter.kind()).backward();
    }
}

fn random_gradients(parameters: &[Tensor]) -> Vec<Tensor> {
    let random = |p: &Tensor| Tensor::randn(p.size(), (Kind::Float, p.device())).to_kind(p.kind());
    parameters.iter().map(random).collect()
}

/// An f32 rounded to the nearest bf16, ties away from zero: the parameter that belongs to a remainder.
fn half_up(master: &Tensor) -> Tensor {
    let words = master.view_dtype(Kind::Int) + 0x8000;
    words.bitwise_right_shift_tensor_scalar(16).to_kind(Kind::Int16).view_dtype(Kind::BFloat16)
}

#[test]
fn the_masters_are_updated_like_f32_parameters() {
    for_each_device(|device| {
        for (algorithm, states) in with_moments() {
            for (kind, masters) in [
                (Kind::BFloat16, MasterWeights::Float),
                (Kind::Half, MasterWeights::Float),
                (Kind::BFloat16, MasterWeights::Remainder),
            ] {
                let parameters = halves(kind, device);
                let twins: Vec<_> =
                    parameters.iter().map(|p| leaf(&p.to_kind(Kind::Float))).collect();
                let builder = algorithm.master_weights(masters).moments(states);
                let [mut opt, mut twin] =
                    [&parameters, &twins].map(|list| builder.build(list, 0.01).unwrap());
                // What rounds moments of few bits depends on the step.
                for step in 0..if states == MomentDtype::F32 { 4 } else { 8 } {
                    let gradients = random_gradients(&parameters);
                    opt.zero_grad().unwrap();
                    twin.zero_grad().unwrap();
                    backward(&parameters, &gradients);
                    backward(&twins, &gradients);
                    opt.step().unwrap();
                    twin.step().unwrap();
                    let context =
                        format!("{algorithm:?} {states:?} {kind:?} {masters:?} step {step}");
                    let [ours, theirs] = [&mut opt, &mut twin]
                        .map(|opt| without_masters(&opt.state_dict().unwrap()));
                    assert!(ours == theirs, "the states: {context}");
                    for (index, (parameter, twin)) in parameters.iter().zip(&twins).enumerate() {
                        let master = opt.master_weight(index).unwrap().unwrap();
                        assert_eq!(bits(&master), bits(twin), "{context}");
                        let rounded = match masters {
                            MasterWeights::Float => twin.to_kind(kind),
                            _ => half_up(&twin.detach().contiguous()),
                        };
                        assert_eq!(bits(parameter), bits(&rounded), "{context}");
                    }
                }
            }
        }
    });
}

/// The reason for master weights: 1 + 1e-4 is rounded to 1 in fp16, as is 1 + 1e-3 in bf16.
#[test]
fn with_masters_small_updates_add_up() {
    for (kind, update) in [(Kind::Half, 1e-4), (Kind::BFloat16, 1e-3)] {
        let train = |masters: MasterWeights| {
            let w = leaf(&Tensor::ones([64], (kind, Device::Cpu)));
            let mut opt = one(&w, Sgd::default(), masters, update);
            for _ in 0..1000 {
                opt.zero_grad().unwrap();
                (-&w).sum(kind).backward();
                opt.step().unwrap();
            }
            w.to_kind(Kind::Double).mean(Kind::Double).double_value(&[])
        };
        let right = 1.0 + 1000.0 * update;
        assert_eq!(train(MasterWeights::None), 1.0);
        let error = |masters| (train(masters) - right).abs() / right;
        // Half a unit in the last place of bf16, plus the rounding errors of f32 over the steps.
        assert!(error(MasterWeights::Float) < 0.5 / 128.0);
        assert!(error(MasterWeights::Remainder) < 0.5 / 128.0);
        // The noise of a thousand roundings, averaged over 64 weights: four standard deviations.
        let deviation = 0.5 / 128.0 * 2.0 * 1000f64.sqrt() / 64f64.sqrt();
        assert!(error(MasterWeights::StochasticRounding { seed: 1 }) < 4.0 * deviation);
    }
}

/// With a scaler: gradients are unscaled in f32, a skipped step changes nothing, and clipping takes effect.
#[test]
fn a_scaler_steps_the_masters() {
    for_each_device(|device| {
        let adams: [Algorithm; 2] = [
            AdamW { eps: 1e-16, ..Default::default() }.into(),
            Adam { weight_decay: 0.1, ..Default::default() }.into(),
        ];
        for (kind, config) in
            [Kind::Half, Kind::BFloat16].into_iter().flat_map(|kind| adams.map(|adam| (kind, adam)))
        {
            for how in ["step", "unscale", "clip"] {
                let parameters = halves(kind, device);
                let twins: Vec<_> =
                    parameters.iter().map(|p| leaf(&p.to_kind(Kind::Float))).collect();
                let mut opt = build(config, &parameters, MasterWeights::Float);
                let mut twin = build(config, &twins, MasterWeights::None);
                let [mut scaler, mut other] = [(); 2].map(|()| scaler(device, 65536.0));
                for step in 0..3 {
                    let gradients = random_gradients(&parameters);
                    let factor = if step == 1 { f64::INFINITY } else { 1.0 };
                    let before: Vec<_> = parameters.iter().map(bits).collect();
                    let run = |opt: &mut Optimizer, scaler: &mut GradScaler, list: &[Tensor]| {
                        opt.zero_grad().unwrap();
                        for (p, gradient) in list.iter().zip(&gradients) {
                            // In fp16, the unscaled gradients would be zero or have few bits.
                            let scaled = (gradient * factor).to_kind(p.kind());
                            (p * scaled).sum(p.kind()).backward();
                        }
                        drop(scaler.scale(&Tensor::from(1f32).to_device(device)).unwrap());
                        let outcome = match how {
                            "step" => scaler.step(opt),
                            "unscale" => scaler.unscale_(opt).and_then(|()| scaler.step(opt)),
                            _ => scaler.step_clip_norm(opt, 1e-3),
                        };
                        let stepped = outcome.unwrap().is_stepped().unwrap();
                        scaler.update().unwrap();
                        stepped
                    };
                    let stepped = run(&mut opt, &mut scaler, &parameters);
                    assert_eq!(stepped, run(&mut twin, &mut other, &twins));
                    assert_eq!(stepped, step != 1, "{kind:?} {how}");
                    for (index, parameter) in parameters.iter().enumerate() {
                        let context = format!("{kind:?} {how} step {step}");
                        let master = opt.master_weight(index).unwrap().unwrap();
                        assert_eq!(bits(&master), bits(&twins[index]), "{context}");
                        assert_eq!(bits(parameter), bits(&master.to_kind(kind)), "{context}");
                        assert!(stepped || bits(parameter) == before[index], "{context}");
                    }
                }
            }
        }
    });
}

/// Steps a bf16 tensor filled with one number once, with SGD and a learning rate of 1.
fn rounded(start: f64, update: f64, count: i64, seed: u64) -> Tensor {
    let w = leaf(&Tensor::full([count], start, (Kind::BFloat16, Device::Cpu)));
    let masters = MasterWeights::StochasticRounding { seed };
    let mut opt = one(&w, Sgd::default(), masters, 1.0);
    opt.accumulate_in_f32().unwrap();
    (&w * 0.0).sum(Kind::BFloat16).backward();
    drop(tch::no_grad(|| w.grad().fill_(-update)));
    opt.step().unwrap();
    w.detach()
}

#[test]
fn stochastic_rounding_is_unbiased() {
    const COUNT: i64 = 1 << 20;
    // Between 1 and 2, neighbouring bf16 numbers are 1/128 apart.
    for share in [0.125, 0.5, 0.9] {
        let w = rounded(1.0, share / 128.0, COUNT, 7).to_kind(Kind::Double);
        let up = ((&w - 1.0) * 128.0).mean(Kind::Double).double_value(&[]);
        let deviation = (share * (1.0 - share) / COUNT as f64).sqrt();
        assert!((up - share).abs() < 5.0 * deviation, "{up} for {share}");
        assert!(w.eq(1.0).logical_or(&w.eq(1.0 + 1.0 / 128.0)).all().int64_value(&[]) == 1);
        // Neighbouring elements are rounded independently: their correlation is that of chance.
        let centred = (&w - w.mean(Kind::Double)) / w.std(true);
        let (a, b) = (centred.slice(0, 0, COUNT - 1, 1), centred.slice(0, 1, COUNT, 1));
        let correlation = (a * b).mean(Kind::Double).double_value(&[]);
        assert!(correlation.abs() < 5.0 / (COUNT as f64).sqrt(), "{correlation}");
    }
    // A bf16 number is rounded to itself, and non-finite values stay non-finite.
    assert_eq!(rounded(-1.5, 0.0, 1000, 3).unique_dim(0, false, false, false).0.numel(), 1);
    for special in [f64::INFINITY, f64::NAN] {
        let w = rounded(special, 1.0, 100, 3).to_kind(Kind::Double);
        assert!(
            Vec::<f64>::try_from(w)
                .unwrap()
                .iter()
                .all(|x| x.to_bits() == special.to_bits() || (special.is_nan() && x.is_nan()))
        );
    }
}

#[test]
fn the_last_numbers_of_a_tensor_are_rounded_independently() {
    // Two numbers of a block share a random word, of which each has a half; the last block is not full.
    for count in 17..32 {
        let pairs = (0..20u64).flat_map(|seed| {
            let w = rounded(1.0, 0.5 / 128.0, count, seed);
            let up = Vec::<f64>::try_from(w.to_kind(Kind::Double)).unwrap();
            (16..count as usize).map(move |i| up[i] == up[i - 16]).collect::<Vec<_>>()
        });
        let pairs: Vec<_> = pairs.collect();
        let (same, count) = (pairs.iter().filter(|same| **same).count(), pairs.len());
        assert!(4 * same > count && 4 * same < 3 * count || count < 60, "{same} of {count} agree");
        assert!(same < count, "all {count} agree");
    }
}

/// From 2^24 steps on, f32 has no number for each of them.
#[test]
fn each_step_rounds_with_random_numbers_of_its_own_however_many_there_were() {
    const COUNT: i64 = 1 << 12;
    const STEPS: i32 = 64;
    for_each_device(|device| {
        for before in [0f32, 16_777_200.0, 16_777_216.0, 16_777_218.0, 1e9, 4e18] {
            let numbers = Tensor::full([COUNT], 1.0, (Kind::BFloat16, device));
            let w = leaf(&numbers);
            let masters = MasterWeights::StochasticRounding { seed: 7 };
            let mut opt = one(&w, Sgd::default(), masters, 1.0);
            opt.accumulate_in_f32().unwrap();
            (&w * 0.0).sum(Kind::BFloat16).backward();
            // Between 1 and 2, neighbouring bf16 numbers are 1/128 apart.
            drop(tch::no_grad(|| w.grad().fill_(-0.25 / 128.0)));
            opt.step().unwrap();
            load_with(&mut opt, "step", Tensor::from(before)).unwrap();
            let mut counts = Vec::new();
            for _ in 1..STEPS {
                opt.step().unwrap();
                counts.push(to_f64(&opt.state_dict().unwrap().state["0"]["step"])[0]);
            }
            assert!(counts.windows(2).all(|pair| pair[0] < pair[1]), "{counts:?}");
            let ups = (w.to_kind(Kind::Double) - 1.0) * 128.0;
            let steps = f64::from(STEPS);
            let error = (&ups - 0.25 * steps).square().mean(Kind::Double).sqrt().double_value(&[]);
            // The variance of a sum of independent roundings. Equal ones would deviate eight times as much.
            let deviation = (0.25 * 0.75 * steps).sqrt();
            assert!(
                (error / deviation - 1.0).abs() < 0.1,
                "{error}, not {deviation}, after {before}"
            );
        }
    });
}

/// A resumed run draws the random numbers of the one that was saved, on every device.
#[test]
fn the_count_of_random_rounding_goes_on_from_a_state() {
    for before in [5f32, 16_777_214.0, 16_777_216.0, 3e7] {
        let told = std::cell::RefCell::new(Vec::new());
        for_each_device(|device| {
            for resumes in [false, true] {
                let w = leaf(&Tensor::ones([300], (Kind::BFloat16, device)));
                let masters = MasterWeights::StochasticRounding { seed: 7 };
                let build =
                    || AdamW::default().master_weights(masters).build(&[w.shallow_clone()], 1e-3);
                let mut opt = build().unwrap();
                backward(&[w.shallow_clone()], &[w.detach()]);
                opt.step().unwrap();
                load_with(&mut opt, "step", Tensor::from(before)).unwrap();
                for _ in 0..5 {
                    opt.step().unwrap();
                    if resumes {
                        let mut next = build().unwrap();
                        next.load_state_dict(&opt.state_dict().unwrap()).unwrap();
                        opt = next;
                    }
                }
                let step = to_f64(&opt.state_dict().unwrap().state["0"]["step"]);
                told.borrow_mut().push((bits(&w.to_device(Device::Cpu)), step));
            }
        });
        let told = told.into_inner();
        assert!(told.iter().all(|one| *one == told[0]), "after {before} steps");
    }
}

#[test]
fn stochastic_rounding_is_determined_by_its_seed() {
    let one = bits(&rounded(1.0, 0.003, 5000, 1));
    assert_eq!(one, bits(&rounded(1.0, 0.003, 5000, 1)));
    assert_ne!(one, bits(&rounded(1.0, 0.003, 5000, 2)));
    // Each parameter and each step uses random numbers of its own.
    let parameters = [0, 1].map(|_| leaf(&Tensor::ones([5000], (Kind::BFloat16, Device::Cpu))));
    let masters = MasterWeights::StochasticRounding { seed: 1 };
    let mut opt = Sgd::default().master_weights(masters).build(&parameters, 0.003).unwrap();
    let mut seen = Vec::new();
    for _ in 0..2 {
        for parameter in &parameters {
            drop(tch::no_grad(|| parameter.shallow_clone().fill_(1.0)));
        }
        opt.zero_grad().unwrap();
        backward(&parameters, &parameters.each_ref().map(|p| -p.detach()));
        opt.step().unwrap();
        seen.extend(parameters.iter().map(bits));
    }
    let count = seen.len();
    seen.sort();
    seen.dedup();
    assert_eq!(seen.len(), count);
}

#[test]
fn masters_are_saved_and_recreated() {
    for algorithm in algorithms() {
        for &masters in &MASTERS[1..] {
            let parameters = halves(Kind::BFloat16, Device::Cpu);
            let mut opt = build(algorithm, &parameters, masters);
            let step = |opt: &mut Optimizer, list: &[Tensor], gradients: &[Tensor]| {
                opt.zero_grad().unwrap();
                backward(list, gradients);
                opt.step().unwrap();
            };
            step(&mut opt, &parameters, &random_gradients(&parameters));
            let copies: Vec<_> = parameters.iter().map(leaf).collect();
            let mut other = build(algorithm, &copies, masters);
            other.load_state_dict(&opt.state_dict().unwrap()).unwrap();
            let gradients = random_gradients(&parameters);
            step(&mut opt, &parameters, &gradients);
            step(&mut other, &copies, &gradients);
            for (one, other) in parameters.iter().zip(&copies) {
                assert_eq!(bits(one), bits(other), "{algorithm:?} {masters:?}");
            }
            // Without master weights in the state, training resumes from the parameters.
            let mut state = opt.state_dict().unwrap();
            for tensors in state.state.values_mut() {
                tensors.remove("master_param");
            }
            other.load_state_dict(&state).unwrap();
            assert!(other.master_weight(1).unwrap().is_none());
        }
    }
}

#[test]
fn masters_are_discarded_on_request() {
    let w = leaf(&Tensor::ones([2], (Kind::BFloat16, Device::Cpu)));
    let list = [w.shallow_clone()];
    let adam = Adam::default();
    let mut opt = adam.master_weights(MasterWeights::Float).build(&list, 0.5).unwrap();
    let step = |opt: &mut Optimizer| {
        opt.zero_grad().unwrap();
        (&w * 1.0).sum(Kind::BFloat16).backward();
        opt.step().unwrap();
    };
    step(&mut opt);
    drop(tch::no_grad(|| w.shallow_clone().fill_(4.0)));
    opt.reset_master_weights();
    step(&mut opt);
    assert!((w.double_value(&[0]) - 3.5).abs() < 0.05, "{w:?}");
    assert_eq!(opt.master_weights(), MasterWeights::Float);
}

/// A VarStore may contain variables that are not trained. They and variables without a gradient keep their values.
#[test]
fn frozen_parameters_are_unchanged() {
    let [w, frozen, idle] =
        [0, 1, 2].map(|_| leaf(&Tensor::ones([2], (Kind::BFloat16, Device::Cpu))));
    let frozen = frozen.set_requires_grad(false);
    let list = [&w, &frozen, &idle].map(Tensor::shallow_clone);
    let adam = Adam::default();
    let mut opt = adam.master_weights(MasterWeights::Float).build(&list, 0.5).unwrap();
    opt.accumulate_in_f32().unwrap();
    let mut scaler = GradScaler::new(Device::Cpu).unwrap();
    scaler.backward(&(&w * &frozen).sum(Kind::BFloat16).to_kind(Kind::Float)).unwrap();
    scaler.unscale_(&mut opt).unwrap();
    assert!(scaler.step(&mut opt).unwrap().is_stepped().unwrap());
    scaler.update().unwrap();
    let first = |t: &Tensor| t.double_value(&[0]);
    assert_eq!((first(&w), first(&frozen), first(&idle)), (0.5, 1.0, 1.0));
    assert!(opt.master_weight(1).unwrap().is_none() && opt.master_weight(2).unwrap().is_none());
}

/// NaNs with significant bits in the lower half: rounding must not turn them into infinities or numbers.
#[test]
fn a_nan_of_any_bits_makes_the_weight_nan() {
    for_each_device(|device| {
        for word in [0x7fff_ffffu32, 0x7f80_0001, 0xffff_ffff, 0x7fc0_0000] {
            for masters in [MasterWeights::Float, MasterWeights::Remainder] {
                let w = testkit::tensors::leaf(&[1.0, 2.0], Kind::BFloat16, device);
                let mut opt = one(&w, Sgd::default(), masters, 1.0);
                opt.accumulate_in_f32().unwrap();
                w.sum(Kind::BFloat16).backward();
                let gradient = Tensor::from_slice(&[f32::from_bits(word), 0.5]).to_device(device);
                tch::no_grad(|| w.grad().copy_(&gradient));
                opt.step().unwrap();
                let weights = to_f64(&w);
                assert!(weights[0].is_nan(), "{word:x} {masters:?} on {device:?}: {weights:?}");
                assert_eq!(weights[1], 1.5);
            }
        }
    });
}
