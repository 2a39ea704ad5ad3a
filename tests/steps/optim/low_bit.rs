//! Low-bit moments. The reference is [`testkit::low_bit`]: the definition in plain loops.

mod histories;
mod losses;

use std::collections::BTreeMap;

use tch::{Device, Kind, Tensor, nn};
use tch_amp::optim::{
    Adafactor, Adam, AdamW, Algorithm, Lion, MasterWeights, MomentDtype, Muon, NAdam, Optimizer,
    OptimizerState, ParamGroup, Sgd,
};

use crate::optim::{load_with, set_grad, to_f64};
use testkit::bits::{bits, canonical};
use testkit::low_bit::{
    Moments, Momentum, Options, decoded, gradients, largest_code, normal, sizes,
};
use testkit::programs::passes;
use testkit::rng::Rng;
use testkit::{assert_says, for_each_device};

const MODES: [MomentDtype; 2] = [MomentDtype::EightBit, MomentDtype::BFloat16];

/// Each algorithm in each of its modes.
pub(super) fn cases() -> [(Algorithm, MomentDtype); 3] {
    let [eight_bits, bfloat16] = MODES.map(|states| (AdamW::default().into(), states));
    [eight_bits, bfloat16, (Muon::default().into(), MomentDtype::BFloat16)]
}

/// The bits of a parameter's moments, in the order in which the emulation has them.
fn kept(optimizer: &mut Optimizer, name: &str) -> Vec<Vec<u8>> {
    let state = optimizer.state_dict().unwrap().state;
    let keys = ["exp_avg", "exp_avg_sq", "exponents", "momentum_buffer"];
    without_nan_codes(keys.iter().filter_map(|key| state[name].get(*key)).map(bits).collect())
}

/// A block with a number that is not finite is NaN, whatever its codes are. They depend on the sign of the NaN, which
/// differs between the instructions of a processor.
fn without_nan_codes(mut moments: Vec<Vec<u8>>) -> Vec<Vec<u8>> {
    if let [exp_avg, exp_avg_sq, exponents] = &mut moments[..] {
        for codes in [exp_avg, exp_avg_sq] {
            let blocks = codes.chunks_mut(32).zip(exponents.iter());
            blocks.filter(|(_, exponent)| **exponent == 223).for_each(|(block, _)| block.fill(0));
        }
    }
    moments
}

fn bytes(moments: &Moments) -> Vec<Vec<u8>> {
    let signed = |codes: &[i8]| codes.iter().map(|code| *code as u8).collect::<Vec<_>>();
    // As `bits` has them.
    let halves = |words: &[u16]| {
        let bytes = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        canonical(Kind::BFloat16, bytes)
    };
    match moments {
        Moments::EightBit { exp_avg, exp_avg_sq, exponents } => {
            without_nan_codes(vec![signed(exp_avg), exp_avg_sq.clone(), exponents.clone()])
        }
        Moments::BFloat16 { exp_avg, exp_avg_sq } => vec![halves(exp_avg), halves(exp_avg_sq)],
    }
}

fn build(algorithm: Algorithm, states: MomentDtype, parameter: &Tensor, lr: f64) -> Optimizer {
    let builder = algorithm.master_weights(MasterWeights::None).moments(states);
    builder.build(&[parameter.shallow_clone()], lr).unwrap()
}

/// Steps an optimizer and the emulation side by side, and compares all bits after each step.
fn compare(algorithm: Algorithm, options: &Options, states: MomentDtype, count: usize, steps: u64) {
    let mut rng = Rng::new(count as u64);
    let start: Vec<f32> = (0..count).map(|_| normal(&mut rng) as f32).collect();
    // Memory that is aligned to 4 bytes only.
    let memory = Tensor::from_slice(&[&[0.0], &start[..]].concat());
    let parameter = memory.narrow(0, 1, count as i64).set_requires_grad(true);
    let mut optimizer = build(algorithm, states, &parameter, options.lr);
    let (mut moments, mut numbers) = (Moments::new(states, count), start);
    let sizes = sizes(count, &mut rng);
    for step in 1..=steps {
        let mut gradients = gradients(&sizes, step, &mut rng);
        if step == steps - 2 {
            gradients[40] = f32::NAN;
            gradients[99] = f32::INFINITY;
            gradients[130] = -f32::NAN;
            gradients[170] = 3e19;
        }
        set_grad(&parameter, &gradients);
        optimizer.step().unwrap();
        moments.step(options, step, &mut numbers, &gradients);
        let context = format!("{states:?}, {count} elements, step {step}");
        assert!(
            bits(&parameter) == bits(&Tensor::from_slice(&numbers)),
            "the parameter: {context}"
        );
        assert!(kept(&mut optimizer, "0") == bytes(&moments), "the moments: {context}");
    }
    let lost = numbers.iter().enumerate().filter(|(_, number)| !number.is_finite());
    let lost: Vec<_> = lost.map(|(index, _)| index).collect();
    let blocks: Vec<_> = [32..64, 96..128, 128..160].into_iter().flatten().collect();
    // With 8 bits a number that is not finite makes its block NaN.
    let expected = if states == MomentDtype::EightBit { blocks } else { vec![40, 99, 130] };
    assert!(expected.iter().all(|index| lost.contains(index)), "{states:?}: {lost:?}");
    let only = |index: &usize| {
        expected.contains(index) || states == MomentDtype::EightBit && (160..192).contains(index)
    };
    assert!(lost.iter().all(only), "{states:?}: {lost:?}");
}

/// Another test starts this one by its name.
#[test]
fn a_step_has_the_bits_of_the_definition() {
    let adamw = AdamW { weight_decay: 0.1, ..AdamW::default() };
    let options = Options { adamw, lr: 1e-3, l2: 0.0 };
    let betas = (0.8, 0.95);
    let adam = Adam { weight_decay: 0.1, betas, maximize: true, ..Adam::default() };
    let of_adam = AdamW { weight_decay: 0.0, betas, maximize: true, ..AdamW::default() };
    let of_adam = Options { adamw: of_adam, lr: 1e-2, l2: 0.1 };
    for states in MODES {
        // Several chunks of a parallel loop, and a last block of 5 elements.
        compare(adamw.into(), &options, states, 2 * 65536 + 37, 80);
        compare(adam.into(), &of_adam, states, 4097, 60);
        // Without weight decay in the gradient, its sign alone is changed.
        let adamw = AdamW { maximize: true, ..adamw };
        compare(adamw.into(), &Options { adamw, ..options }, states, 4097, 20);
    }
}

/// A step is that of an optimizer with an f32 momentum, which has that of the emulation before each step.
#[test]
fn a_step_of_muon_has_the_bits_of_the_definition() {
    // Several chunks of a parallel loop, and a last tile of 79 elements.
    for (size, nesterov) in [([331, 397], true), ([70, 65], false)] {
        let mut rng = Rng::new(11);
        let count = (size[0] * size[1]) as usize;
        let start: Vec<f32> = (0..count).map(|_| normal(&mut rng) as f32).collect();
        let leaf = || Tensor::from_slice(&start).view(size).set_requires_grad(true);
        let (parameter, twin) = (leaf(), leaf());
        let muon = Muon { nesterov, ns_steps: 1, ..Muon::default() };
        let mut optimizer = build(muon.into(), MomentDtype::BFloat16, &parameter, 0.1);
        let mut plain = build(muon.into(), MomentDtype::F32, &twin, 0.1);
        let mut momentum = Momentum(vec![0; count]);
        let sizes = sizes(count, &mut rng);
        for step in 1..=60 {
            let mut gradients = gradients(&sizes, step, &mut rng);
            if step == 58 {
                gradients[40] = f32::NAN;
                gradients[99] = f32::INFINITY;
                gradients[130] = -f32::NAN;
            }
            let mut state = plain.state_dict().unwrap();
            if let Some(entries) = state.state.get_mut("0") {
                let numbers = Tensor::from_slice(&momentum.numbers()).view(size);
                drop(entries.insert("momentum_buffer".to_owned(), numbers));
            }
            plain.load_state_dict(&state).unwrap();
            for (parameter, optimizer) in [(&parameter, &mut optimizer), (&twin, &mut plain)] {
                set_grad(parameter, &gradients);
                optimizer.step().unwrap();
            }
            momentum.step(muon.momentum, step, &gradients);
            let words: Vec<_> = momentum.0.iter().flat_map(|word| word.to_le_bytes()).collect();
            let expected = canonical(Kind::BFloat16, words);
            assert!(kept(&mut optimizer, "0") == [expected], "the momentum: {size:?}, step {step}");
            assert!(bits(&parameter) == bits(&twin), "the parameter: {size:?}, step {step}");
            assert_eq!(parameter.isfinite().all().int64_value(&[]) == 1, step < 58);
        }
    }
}

#[test]
fn every_set_of_instructions_has_the_same_bits() {
    for capability in ["default", "avx2"] {
        let test = "optim::low_bit::a_step_has_the_bits_of_the_definition";
        assert!(passes(test, &[("ATEN_CPU_CAPABILITY", capability)]), "{capability}");
    }
}

/// The largest number of `update / lr` that two steps from any stored moments can have, over what exact ones can.
fn bounds((beta1, beta2): (f64, f64)) -> (f64, f64) {
    let of_gradient = (1.0 - beta1) * (1.0 - beta1) / (1.0 - beta2);
    let exact = (of_gradient / (1.0 - beta1 * beta1 / beta2)).sqrt();
    let stored =
        f64::from(f32::from_bits((largest_code((beta1, beta2)) << 19) + 0x3d80_0000)) - 0.0625;
    (2.0 * exact, (stored * stored * beta1 * beta1 / beta2 + of_gradient).sqrt())
}

/// Loads random codes of a state before step 100,000; half of the first moments are the largest that are allowed.
fn load_random_codes(optimizer: &mut Optimizer, count: usize, most: usize, rng: &mut Rng) {
    let code = |rng: &mut Rng| {
        let code = if rng.one_in(2) { most } else { rng.below(most + 1) } as i8;
        if rng.one_in(2) { -code } else { code }
    };
    let exp_avg: Vec<i8> = (0..count).map(|_| code(rng)).collect();
    let exp_avg_sq: Vec<u8> = (0..count).map(|_| rng.below(256) as u8).collect();
    let exponents: Vec<u8> = (0..count / 32).map(|_| rng.below(160) as u8).collect();
    let mut state = optimizer.state_dict().unwrap();
    let tensors = [
        ("exp_avg", Tensor::from_slice(&exp_avg)),
        ("exp_avg_sq", Tensor::from_slice(&exp_avg_sq)),
        ("exponents", Tensor::from_slice(&exponents)),
        ("step", Tensor::from(99_999i64)),
    ];
    let tensors = tensors.map(|(key, tensor)| (key.to_owned(), tensor));
    state.state.get_mut("0").unwrap().extend(tensors);
    optimizer.load_state_dict(&state).unwrap();
}

/// For each number the gradient that makes the largest update from its codes, or a random multiple of it.
fn worst_gradients(codes: &[Vec<u8>], betas: (f64, f64), rng: &mut Rng) -> Vec<f32> {
    let worst = |index: usize| {
        let (first, second) = decoded(codes[0][index] as i8, codes[1][index], codes[2][index / 32]);
        let [exp_avg, exp_avg_sq] = [first, second].map(f64::from);
        let exp_avg = if exp_avg == 0.0 { 1.0 } else { exp_avg };
        (1.0 - betas.0) * betas.1 * exp_avg_sq / ((1.0 - betas.1) * betas.0 * exp_avg)
    };
    let mut multiple = |index: usize| {
        if index.is_multiple_of(3) { 10f64.powf(normal(rng)) } else { 1.0 }
    };
    (0..codes[0].len()).map(|index| (worst(index) * multiple(index)) as f32).collect()
}

/// The largest `update / lr`, without the corrections of early steps, of three steps from random codes.
fn largest_update(betas: (f64, f64), count: usize, rng: &mut Rng) -> f64 {
    let most = largest_code(betas) as usize;
    let parameter =
        Tensor::zeros([count as i64], (Kind::Float, Device::Cpu)).set_requires_grad(true);
    let adamw = AdamW { betas, eps: 0.0, weight_decay: 0.0, ..AdamW::default() };
    let mut optimizer = build(adamw.into(), MomentDtype::EightBit, &parameter, 1.0);
    set_grad(&parameter, &vec![0.0; count]);
    optimizer.step().unwrap();
    load_random_codes(&mut optimizer, count, most, rng);
    let mut largest = 0.0f64;
    for step in 100_000..100_003u64 {
        let codes = kept(&mut optimizer, "0");
        set_grad(&parameter, &worst_gradients(&codes, betas, rng));
        let _zeros = tch::no_grad(|| parameter.shallow_clone().zero_());
        optimizer.step().unwrap();
        let [first, second] = [betas.0, betas.1].map(|beta| 1.0 - beta.powf(step as f64));
        largest = largest.max(parameter.abs().max().double_value(&[]) * first / second.sqrt());
        let codes = kept(&mut optimizer, "0").remove(0);
        let are_allowed = codes.iter().all(|code| (*code as i8).unsigned_abs() as usize <= most);
        // With a planted fault the updates have to show it.
        let is_planted =
            std::env::var("TCH_AMP_PLANTED_FAULT").is_ok_and(|fault| fault == "code_bound");
        assert!(is_planted || are_allowed, "{betas:?}");
    }
    largest
}

/// Another test starts this one by its name.
#[test]
fn no_update_is_larger_than_twice_the_exact_bound() {
    let mut rng = Rng::new(7);
    let mut nearest = 0.0f64;
    for betas in [(0.9, 0.999), (0.9, 0.95), (0.9, 0.99), (0.95, 0.99), (0.8, 0.999), (0.9, 0.9999)]
    {
        let (proven, sharp) = bounds(betas);
        let largest = (0..30).map(|_| largest_update(betas, 32 * 256, &mut rng));
        let largest = largest.fold(0.0, f64::max);
        assert!(largest <= proven.min(sharp) * (1.0 + 1e-5), "{betas:?}: {largest}");
        nearest = nearest.max(largest / sharp);
        println!("{betas:?}: {:.4} of twice the exact bound", largest / proven);
    }
    assert!(nearest > 0.999, "no gradient was the worst one: {nearest}");
}

#[test]
#[cfg_attr(not(debug_assertions), ignore = "faults are planted in debug builds")]
fn a_cap_that_is_one_too_large_breaks_the_bound() {
    let test = "optim::low_bit::no_update_is_larger_than_twice_the_exact_bound";
    assert!(passes(test, &[("TCH_AMP_PLANTED_FAULT", "none")]));
    assert!(!passes(test, &[("TCH_AMP_PLANTED_FAULT", "code_bound")]));
}

/// The codes are in the order of the elements, so that a state fits a model in another memory format.
#[test]
fn the_memory_format_makes_no_difference() {
    for (algorithm, states) in cases() {
        let size = match algorithm {
            Algorithm::Muon(_) => vec![24, 13 * 4 * 5],
            _ => vec![24, 13, 4, 5],
        };
        let start = Tensor::randn(&size, (Kind::Float, Device::Cpu));
        let plain = start.copy().set_requires_grad(true);
        let other = match start.dim() {
            2 => start.tr().contiguous().tr(),
            _ => start.permute([0, 2, 3, 1]).contiguous().permute([0, 3, 1, 2]),
        };
        let other = other.set_requires_grad(true);
        assert!(!other.is_contiguous());
        let mut first = build(algorithm, states, &plain, 1e-3);
        let mut second = build(algorithm, states, &other, 1e-3);
        for _ in 0..4 {
            let gradient = Tensor::randn(&size, (Kind::Float, Device::Cpu));
            for (parameter, optimizer) in [(&plain, &mut first), (&other, &mut second)] {
                optimizer.zero_grad().unwrap();
                (parameter * &gradient).sum(Kind::Float).backward();
                optimizer.step().unwrap();
            }
            assert_eq!(bits(&plain), bits(&other), "{states:?}");
            assert_eq!(kept(&mut first, "0"), kept(&mut second, "0"), "{states:?}");
        }
        second.load_state_dict(&first.state_dict().unwrap()).unwrap();
        assert_eq!(kept(&mut first, "0"), kept(&mut second, "0"), "{states:?}");
    }
}

/// An AdamW that has taken some steps, and its parameter.
fn trained(states: MomentDtype, count: usize) -> (Tensor, Optimizer) {
    trained_by(AdamW::default().into(), states, &[count as i64])
}

/// An optimizer that has taken some steps, and its parameter.
fn trained_by(algorithm: Algorithm, states: MomentDtype, size: &[i64]) -> (Tensor, Optimizer) {
    let parameter = Tensor::randn(size, (Kind::Float, Device::Cpu)).set_requires_grad(true);
    let mut optimizer = build(algorithm, states, &parameter, 1e-3);
    for _ in 0..20 {
        let gradient = Tensor::randn(size, (Kind::Float, Device::Cpu)) * 1e-3;
        set_grad(&parameter, &to_f64(&gradient));
        optimizer.step().unwrap();
    }
    (parameter, optimizer)
}

/// How far a moment may be from its nearest value in a mode: half of the distance of two values.
fn rounding(mode: MomentDtype, place: usize, numbers: &[Tensor; 2]) -> Tensor {
    let [exp_avg, exp_avg_sq] = numbers;
    match (mode, place) {
        (MomentDtype::F32, _) => numbers[place].zeros_like(),
        // 128 values in each power of two.
        (MomentDtype::BFloat16, _) => numbers[place].abs() / 256.0,
        // 16 values in each power of two of |exp_avg| / S + 1/16, where S is at most the root of the stored exp_avg_sq.
        (_, 0) => (exp_avg.abs() + exp_avg_sq.sqrt() * 1.04 / 16.0) / 32.0,
        // 8 values in each power of two.
        _ => exp_avg_sq / 16.0,
    }
}

#[test]
fn a_state_is_loaded_bit_by_bit_and_converted_to_other_modes() {
    let all = [MomentDtype::F32, MomentDtype::BFloat16, MomentDtype::EightBit];
    for from in all {
        let (parameter, mut optimizer) = trained(from, 4999);
        let saved = optimizer.state_dict().unwrap();
        let numbers = moments(&mut optimizer);
        for to in all {
            let mut other = build(AdamW::default().into(), to, &parameter, 1e-3);
            other.load_state_dict(&saved).unwrap();
            assert_eq!(other.state_dict().unwrap().state["0"]["step"].double_value(&[]), 20.0);
            if from == to {
                assert_eq!(kept(&mut optimizer, "0"), kept(&mut other, "0"), "{from:?}");
            }
            for (place, (here, there)) in numbers.iter().zip(moments(&mut other)).enumerate() {
                let far = (here - &there).abs().gt_tensor(&rounding(to, place, &numbers));
                let far = far.sum(Kind::Int64).int64_value(&[]);
                assert_eq!(far, 0, "{from:?} to {to:?}, moment {place}");
            }
            // Back without a step in between, nothing changes.
            let mut back = build(AdamW::default().into(), from, &parameter, 1e-3);
            if to == MomentDtype::F32 {
                back.load_state_dict(&other.state_dict().unwrap()).unwrap();
                assert_eq!(kept(&mut optimizer, "0"), kept(&mut back, "0"), "{from:?} by f32");
            }
        }
    }
}

/// Codes are converted a part of 2^20 numbers at a time. A block's codes depend on its own numbers alone, so that
/// shorter tensors, each in a part of its own, have those of a longer one.
#[test]
fn moments_of_several_parts_are_converted_like_those_of_one() {
    const PIECE: usize = 3 << 18;
    let count = (1 << 21) + 4133;
    let mut rng = Rng::new(23);
    // All pieces have other numbers, and each number its own size.
    let random = |index: usize, rng: &mut Rng| {
        let size = 1e-6 * (1 + index % 977) as f32 * (1 + index / PIECE) as f32;
        size * (rng.below(2001) as f32 / 1000.0 - 1.0)
    };
    let firsts: Vec<f32> = (0..count).map(|index| random(index, &mut rng)).collect();
    let seconds: Vec<f32> = firsts.iter().rev().map(|first| first * first).collect();
    for_each_device(|device| {
        let converted = |from: MomentDtype, to: MomentDtype, tensors: BTreeMap<String, Tensor>| {
            let size = tensors["exp_avg"].size();
            let parameter = Tensor::zeros(size, (Kind::Float, device)).set_requires_grad(true);
            let [mut given, mut other] =
                [from, to].map(|states| build(AdamW::default().into(), states, &parameter, 1e-3));
            let mut state = given.state_dict().unwrap();
            state.state.insert("0".to_owned(), tensors);
            given.load_state_dict(&state).unwrap();
            other.load_state_dict(&given.state_dict().unwrap()).unwrap();
            other.state_dict().unwrap().state.remove("0").unwrap()
        };
        let moments = |range: std::ops::Range<usize>| {
            let [first, second] =
                [&firsts, &seconds].map(|numbers| Tensor::from_slice(&numbers[range.clone()]));
            let step = Tensor::from(7f32);
            let named = [("exp_avg", first), ("exp_avg_sq", second), ("step", step)];
            BTreeMap::from(named.map(|(key, tensor)| (key.to_owned(), tensor)))
        };
        let codes = converted(MomentDtype::F32, MomentDtype::EightBit, moments(0..count));
        let pieces = (0..count).step_by(PIECE).map(|begin| begin..count.min(begin + PIECE));
        let pieces: Vec<_> = pieces
            .map(|range| converted(MomentDtype::F32, MomentDtype::EightBit, moments(range)))
            .collect();
        for key in ["exp_avg", "exp_avg_sq", "exponents"] {
            let parts: Vec<_> = pieces.iter().flat_map(|piece| bits(&piece[key])).collect();
            assert!(bits(&codes[key]) == parts, "{key} on {device:?}");
        }
        let [first, second, exponents] =
            ["exp_avg", "exp_avg_sq", "exponents"].map(|key| bits(&codes[key]));
        let numbers = converted(MomentDtype::EightBit, MomentDtype::F32, codes);
        let [firsts, seconds] = ["exp_avg", "exp_avg_sq"].map(|key| to_f64(&numbers[key]));
        for index in 0..count {
            let (one, two) = decoded(first[index] as i8, second[index], exponents[index / 32]);
            let wanted = (one.into(), two.into());
            assert_eq!((firsts[index], seconds[index]), wanted, "{index} on {device:?}");
        }
    });
}

/// Muon counts steps for the dither alone, so that an f32 momentum has no count and a loaded one begins at 0.
#[test]
fn a_momentum_is_loaded_bit_by_bit_and_converted_to_the_other_mode() {
    let muon: Algorithm = Muon::default().into();
    for from in [MomentDtype::F32, MomentDtype::BFloat16] {
        let (parameter, mut optimizer) = trained_by(muon, from, &[70, 65]);
        let saved = optimizer.state_dict().unwrap();
        let buffer = &saved.state["0"]["momentum_buffer"];
        assert_eq!(saved.state["0"].len(), if from == MomentDtype::F32 { 1 } else { 2 });
        for to in [MomentDtype::F32, MomentDtype::BFloat16] {
            let mut other = build(muon, to, &parameter, 1e-3);
            other.load_state_dict(&saved).unwrap();
            let loaded = other.state_dict().unwrap();
            let expected =
                buffer.to_kind(if to == MomentDtype::F32 { Kind::Float } else { Kind::BFloat16 });
            assert_eq!(loaded.state["0"]["momentum_buffer"].kind(), expected.kind());
            assert_eq!(kept(&mut other, "0"), [bits(&expected)], "{from:?} to {to:?}");
            let steps =
                |state: &OptimizerState| Some(state.state["0"].get("step")?.int64_value(&[]));
            let expected = (from == to && to == MomentDtype::BFloat16).then_some(20);
            assert_eq!(steps(&loaded), expected, "{from:?} to {to:?}");
            set_grad(&parameter, &vec![1e-3; 70 * 65]);
            other.step().unwrap();
            let expected = (to == MomentDtype::BFloat16).then_some(expected.unwrap_or(0) + 1);
            assert_eq!(steps(&other.state_dict().unwrap()), expected, "{from:?} to {to:?}");
        }
    }
}

/// The f32 numbers of the moments, exp_avg and exp_avg_sq.
fn moments(optimizer: &mut Optimizer) -> [Tensor; 2] {
    let state = optimizer.state_dict().unwrap().state.remove("0").unwrap();
    let [first, second] = ["exp_avg", "exp_avg_sq"].map(|key| state[key].shallow_clone());
    let Some(exponents) = state.get("exponents") else {
        return [first, second].map(|tensor| tensor.to_kind(Kind::Float));
    };
    let codes = [bits(&first), bits(&second), bits(exponents)];
    let numbers =
        (0..codes[0].len()).map(|i| decoded(codes[0][i] as i8, codes[1][i], codes[2][i / 32]));
    let (first, second): (Vec<_>, Vec<_>) = numbers.unzip();
    [Tensor::from_slice(&first), Tensor::from_slice(&second)]
}

#[test]
fn more_steps_than_an_f32_counts_are_counted() {
    for (algorithm, states) in cases() {
        let (parameter, mut optimizer) = trained_by(algorithm, states, &[64, 64]);
        let many = (1i64 << 24) + 1;
        load_with(&mut optimizer, "step", Tensor::from(many)).unwrap();
        for step in 1..4 {
            set_grad(&parameter, &vec![1e-3; 4096]);
            optimizer.step().unwrap();
            let found = optimizer.state_dict().unwrap().state["0"]["step"].int64_value(&[]);
            assert_eq!(found, many + step, "{states:?}");
        }
    }
}

#[test]
fn moments_take_the_documented_bytes() {
    for ((algorithm, states), expected) in
        cases().into_iter().zip([2 * 5005 + 157, 4 * 5005, 2 * 5005])
    {
        let (_parameter, mut optimizer) = trained_by(algorithm, states, &[77, 65]);
        let reported = optimizer.memory_usage().unwrap().moment_bytes;
        assert_eq!(reported, expected as u64, "{states:?}");
        let state = optimizer.state_dict().unwrap().state.remove("0").unwrap();
        let bytes = |(key, tensor): (&String, &Tensor)| {
            if key == "step" { 0 } else { tensor.numel() * tensor.kind().elt_size_in_bytes() }
        };
        assert_eq!(state.iter().map(bytes).sum::<usize>(), expected, "{states:?}");
    }
    // Small tensors keep f32.
    for (algorithm, states) in cases() {
        let (_parameter, mut optimizer) = trained_by(algorithm, states, &[63, 65]);
        let state = optimizer.state_dict().unwrap().state.remove("0").unwrap();
        assert!(state.values().all(|tensor| tensor.kind() == Kind::Float), "{states:?}");
    }
}

#[test]
fn unsupported_optimizers_and_parameters_are_refused_with_a_remedy() {
    let f32s = Tensor::ones([5000], (Kind::Float, Device::Cpu)).set_requires_grad(true);
    let says = |result: tch_amp::Result<Optimizer>, words: &str| {
        let error = result.unwrap_err().to_string();
        assert!(error.contains(words) && error.contains("MomentDtype::F32"), "{error}");
    };
    let algorithms: [Algorithm; 4] = [
        Lion::default().into(),
        Sgd { momentum: 0.9, ..Sgd::default() }.into(),
        NAdam::default().into(),
        Adafactor::default().into(),
    ];
    let in_eight_bits = Muon::default().moments(MomentDtype::EightBit);
    says(in_eight_bits.build(&[f32s.shallow_clone()], 0.1), "`MomentDtype::BFloat16` or");
    for states in MODES {
        for algorithm in algorithms {
            let builder = algorithm.master_weights(MasterWeights::None).moments(states);
            says(builder.build(&[f32s.shallow_clone()], 0.1), "only Adam, AdamW and Muon");
        }
        let amsgrad = AdamW { amsgrad: true, ..AdamW::default() };
        says(amsgrad.moments(states).build(&[f32s.shallow_clone()], 0.1), "amsgrad");
        let muon = Muon { adamw: amsgrad, ..Muon::default() }.moments(MomentDtype::BFloat16);
        says(muon.build(&[f32s.shallow_clone()], 0.1), "amsgrad");
        for (kind, masters) in [
            (Kind::Double, MasterWeights::None),
            (Kind::BFloat16, MasterWeights::None),
            (Kind::Half, MasterWeights::None),
            (Kind::BFloat16, MasterWeights::StochasticRounding { seed: 1 }),
        ] {
            let parameter = f32s.detach().to_kind(kind).set_requires_grad(true);
            let builder = AdamW::default().moments(states).master_weights(masters);
            says(builder.build(&[parameter], 0.1), "MasterWeights::Remainder");
        }
        // Later, by options, by a state and by a cast.
        let mut optimizer = build(AdamW::default().into(), states, &f32s, 0.1);
        assert_says(optimizer.set_param_group(0, ParamGroup::new(0.1, amsgrad)), "amsgrad");
        let mut with_maximum = build(amsgrad.into(), MomentDtype::F32, &f32s, 0.1);
        set_grad(&f32s, &[1.0; 5000]);
        with_maximum.step().unwrap();
        assert_says(optimizer.load_state_dict(&with_maximum.state_dict().unwrap()), "amsgrad");
        optimizer.step().unwrap();
    }
    let vs = nn::VarStore::new(Device::Cpu);
    let w = vs.root().zeros("w", &[5000]);
    let mut optimizer = AdamW::default().moments(MomentDtype::EightBit).build(&vs, 0.1).unwrap();
    let mut vs = vs;
    vs.bfloat16();
    w.sum(Kind::BFloat16).backward();
    let refused = optimizer.step().unwrap_err().to_string();
    assert!(
        refused.contains("parameter w") && refused.contains("MasterWeights::Remainder"),
        "{refused}"
    );
}

#[test]
fn damaged_codes_are_refused() {
    let (_parameter, mut optimizer) = trained(MomentDtype::EightBit, 4100);
    let before = kept(&mut optimizer, "0");
    let zeros = |count: i64, kind| Some(Tensor::zeros([count], (kind, Device::Cpu)));
    for (key, tensor, words) in [
        ("exponents", zeros(128, Kind::Uint8), "[129]"),
        ("exponents", zeros(129, Kind::Float), "exponents is not in Uint8"),
        ("exp_avg", zeros(4100, Kind::Uint8), "exp_avg is not in Int8"),
        ("exp_avg_sq", zeros(4100, Kind::Float), "exp_avg_sq is not in Uint8"),
        ("exp_avg_sq", None, "exp_avg_sq"),
        ("exponents", None, "without exponents"),
        ("exponents", Some(Tensor::new()), "exponents is not in Uint8"),
    ] {
        assert_says(load_with(&mut optimizer, key, tensor), words);
        assert_eq!(before, kept(&mut optimizer, "0"), "{words}");
    }
    // Any exponents can be loaded. A block of one that no step stores is not finite, wherever it is stepped.
    for exponent in [223, 224, 240, 255] {
        let (parameter, mut other) = trained(MomentDtype::EightBit, 4100);
        let exponents = Tensor::full([129], exponent, (Kind::Uint8, Device::Cpu));
        load_with(&mut other, "exponents", exponents).unwrap();
        assert!(moments(&mut other)[1].isnan().all().int64_value(&[]) == 1, "{exponent}");
        other.step().unwrap();
        assert!(parameter.isnan().all().int64_value(&[]) == 1, "{exponent}");
    }
}

/// A frozen base beside trained adapters: nothing is kept for it.
#[test]
fn a_frozen_parameter_may_have_any_dtype() {
    let base = Tensor::ones([5000], (Kind::BFloat16, Device::Cpu));
    let adapter = Tensor::ones([5000], (Kind::Float, Device::Cpu)).set_requires_grad(true);
    let both = [base.shallow_clone(), adapter.shallow_clone()];
    let mut opt = AdamW::default().moments(MomentDtype::EightBit).build(&both, 0.1).unwrap();
    set_grad(&adapter, &[1.0; 5000]);
    opt.step().unwrap();
    assert_eq!(opt.state_dict().unwrap().state.len(), 1);
}

/// Codes beyond the bound of other betas are saved and loaded as they are.
#[test]
fn a_state_outlives_a_change_of_the_betas() {
    let (parameter, mut optimizer) = trained(MomentDtype::EightBit, 4100);
    let betas = (0.9, 0.95);
    optimizer
        .set_param_group(0, ParamGroup::new(1e-3, AdamW { betas, ..AdamW::default() }))
        .unwrap();
    let largest = Tensor::full([4100], 127, (Kind::Int8, Device::Cpu));
    load_with(&mut optimizer, "exp_avg", largest).unwrap();
    let mut other = build(AdamW::default().into(), MomentDtype::EightBit, &parameter, 1e-3);
    other.load_state_dict(&optimizer.state_dict().unwrap()).unwrap();
    let codes = kept(&mut optimizer, "0");
    assert!(codes[0].iter().all(|code| *code == 127) && codes == kept(&mut other, "0"));
}
