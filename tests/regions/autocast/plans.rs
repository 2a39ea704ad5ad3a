//! Plans, beside the same programs with casts and attention by hand.

use tch::{Device, Kind, Reduction, Tensor};
use tch_amp::autocast::{AutocastError, AutocastState, Plan, Rule, RunAs};
use tch_amp::checkpoint::Checkpoint;
use tch_amp::optim::AdamW;
use tch_amp::{Amp, Autocast, Error, MixedPrecision};

use crate::autocast::{BF16, F32, OUTSIDE, gradient, random, refusal, seen};
use testkit::rng::Rng;
use testkit::{assert_says, for_each_device};

const SDPA: &str = "scaled_dot_product_attention";
const COMPOSED: RunAs = RunAs::Composed { most_bytes: u64::MAX };

fn region(device: Device, rules: Vec<Rule>) -> Autocast {
    let plan = Plan { dtype: Some(BF16), rules, ..Plan::new(device).unwrap() };
    Autocast::new(device).plan(&plan).unwrap()
}

fn attention(q: &Tensor, k: &Tensor, v: &Tensor) -> Tensor {
    Tensor::scaled_dot_product_attention(q, k, v, None::<&Tensor>, 0.0, false, None, false)
}

/// The attention of three tensors of `[batch, length, width]`, composed in bf16.
fn composed_by_hand(q: &Tensor, k: &Tensor, v: &Tensor) -> Tensor {
    let [q, k, v] = [q, k, v].map(|t| t.to_kind(BF16));
    let zero = Tensor::zeros([1, 1, 1], (BF16, q.device()));
    let width = *q.size().last().unwrap() as f64;
    let scores = zero.f_baddbmm(&q, &k.transpose(1, 2), 0.0, 1.0 / width.sqrt()).unwrap();
    scores.softmax(-1, None::<Kind>).bmm(&v)
}

type Call = (&'static str, &'static [&'static [i64]], fn(&[Tensor]) -> Tensor, u64);

/// Calls of operators on tensors of these sizes, and the size of each call.
const SIZES: &[Call] = &[
    ("mm", &[&[3, 4], &[4, 5]], |t| t[0].mm(&t[1]), 60),
    ("matmul", &[&[3, 4], &[4, 5]], |t| t[0].matmul(&t[1]), 60),
    ("matmul", &[&[2, 3, 4], &[4, 5]], |t| t[0].matmul(&t[1]), 120),
    ("matmul", &[&[3, 4], &[2, 4, 5]], |t| t[0].matmul(&t[1]), 120),
    ("matmul", &[&[4], &[2, 4, 5]], |t| t[0].matmul(&t[1]), 40),
    ("matmul", &[&[2, 3, 4], &[4]], |t| t[0].matmul(&t[1]), 24),
    ("matmul", &[&[4], &[4]], |t| t[0].matmul(&t[1]), 4),
    ("matmul", &[&[2, 1, 3, 4], &[3, 4, 5]], |t| t[0].matmul(&t[1]), 360),
    ("mv", &[&[3, 4], &[4]], |t| t[0].mv(&t[1]), 12),
    ("dot", &[&[4], &[4]], |t| t[0].dot(&t[1]), 4),
    ("bmm", &[&[2, 3, 4], &[2, 4, 5]], |t| t[0].bmm(&t[1]), 120),
    ("addmm", &[&[5], &[3, 4], &[4, 5]], |t| t[0].addmm(&t[1], &t[2]), 60),
    ("addmv", &[&[3], &[3, 4], &[4]], |t| t[0].addmv(&t[1], &t[2]), 12),
    ("addbmm", &[&[3, 5], &[2, 3, 4], &[2, 4, 5]], |t| t[0].addbmm(&t[1], &t[2]), 120),
    ("baddbmm", &[&[5], &[2, 3, 4], &[2, 4, 5]], |t| t[0].baddbmm(&t[1], &t[2], 1, 1), 120),
    ("linear", &[&[2, 3, 4], &[5, 4]], |t| t[0].linear(&t[1], None::<&Tensor>), 120),
    ("linear", &[&[3, 4], &[4]], |t| t[0].linear(&t[1], None::<&Tensor>), 12),
    ("conv1d", &[&[2, 6, 9], &[4, 3, 3]], |t| t[0].conv1d(&t[1], None::<&Tensor>, 1, 0, 1, 2), 4),
    (
        "conv_transpose1d",
        &[&[2, 6, 9], &[6, 1, 3]],
        |t| t[0].conv_transpose1d(&t[1], None::<&Tensor>, 1, 0, 0, 2, 1),
        2,
    ),
    (SDPA, &[&[2, 3, 4], &[2, 5, 4], &[2, 5, 4]], |t| attention(&t[0], &t[1], &t[2]), 5),
    (SDPA, &[&[7, 4], &[5, 4], &[5, 4]], |t| attention(&t[0], &t[1], &t[2]), 7),
    ("softmax", &[&[3, 4]], |t| t[0].softmax(-1, None::<Kind>), 12),
    ("cat", &[&[3, 4], &[2, 4]], |t| Tensor::cat(t, 0), 20),
    ("exp", &[&[0]], |t| t[0].exp(), 0),
];

#[test]
fn a_rule_applies_to_the_sizes_that_it_names() {
    for_each_device(|device| {
        for (name, sizes, call, size) in SIZES {
            let inputs: Vec<_> =
                sizes.iter().map(|size| random(device, 1, size).to_kind(BF16)).collect();
            let kind = |at_least, below| {
                let rule = Rule { at_least, below, ..Rule::new(*name, RunAs::F32) };
                let half = Rule::new(*name, RunAs::Half);
                region(device, vec![half, rule]).run(|| call(&inputs)).unwrap().kind()
            };
            assert_eq!(kind(*size, Some(size + 1)), F32, "{name} of {sizes:?}");
            if *size > 0 {
                assert_eq!(kind(0, Some(*size)), BF16, "{name} of {sizes:?}");
            }
            assert_eq!(kind(size + 1, None), BF16, "{name} of {sizes:?}");
            assert_eq!(kind(*size, None), F32, "{name} of {sizes:?}");
        }
    });
    assert_eq!(seen(), OUTSIDE);
}

/// The operators of random programs, on tensors of `[batch, length, length]`.
const OPERATORS: &[&str] =
    &["exp", "softmax", "mul", "add", "matmul", "bmm", "tanh", "linear", SDPA];

fn apply(name: &str, x: &Tensor, w: &Tensor) -> Tensor {
    match name {
        "exp" => x.sigmoid().exp(),
        "softmax" => x.softmax(-1, None::<Kind>),
        "mul" => x * w,
        "add" => x.g_add(w),
        "matmul" => x.matmul(w),
        "bmm" => x.bmm(w),
        "tanh" => x.tanh(),
        "linear" => x.linear(&w.select(0, 0), None::<&Tensor>),
        _ => attention(x, w, x),
    }
}

/// The same operator where a rule says how it runs: without autocast, on inputs that are cast by hand.
fn apply_by_hand(
    device: Device,
    name: &str,
    run_as: Option<RunAs>,
    x: &Tensor,
    w: &Tensor,
) -> Tensor {
    let cast = |kind: Kind| {
        // What comes before the operator itself stays in the region.
        let before = |x: &Tensor| if name == "exp" { x.sigmoid() } else { x.shallow_clone() };
        let x = Autocast::new(device).dtype(BF16).run(|| before(x)).unwrap();
        let w = if name == "linear" { w.select(0, 0) } else { w.shallow_clone() };
        // Each argument is cast, also where two are the same tensor.
        let third = x.to_kind(kind);
        let (x, w) = (x.to_kind(kind), w.to_kind(kind));
        match name {
            SDPA => attention(&x, &w, &third),
            "exp" => x.exp(),
            "linear" => x.linear(&w, None::<&Tensor>),
            _ => apply(name, &x, &w),
        }
    };
    match run_as {
        Some(RunAs::F32) => cast(F32),
        Some(RunAs::Half) => cast(BF16),
        Some(_) => composed_by_hand(x, w, x),
        None => Autocast::new(device).dtype(BF16).run(|| apply(name, x, w)).unwrap(),
    }
}

fn size_of(name: &str, [batch, length]: [i64; 2]) -> u64 {
    let products = ["matmul", "bmm", "linear"];
    let size = match name {
        SDPA => length,
        name if products.contains(&name) => batch * length * length * length,
        _ => batch * length * length,
    };
    u64::try_from(size).unwrap()
}

fn random_rule(rng: &mut Rng) -> Rule {
    let operator = *rng.pick(OPERATORS);
    let mut choices = vec![RunAs::F32, RunAs::Half];
    if operator == SDPA {
        choices.push(COMPOSED);
    }
    let mut bound = || size_of(operator, [1 + rng.below(3) as i64, 1 + rng.below(6) as i64]);
    let (a, b) = (bound(), bound());
    let at_least = if rng.one_in(2) { a } else { 0 };
    // Some above all sizes, and none that is empty.
    let below = (!rng.one_in(3)).then_some(b.max(at_least + 1));
    Rule { at_least, below, ..Rule::new(operator, *rng.pick(&choices)) }
}

/// The rule for a call: the last that applies.
fn found(rules: &[Rule], name: &str, size: u64) -> Option<RunAs> {
    let applies = |rule: &&Rule| {
        rule.operator == name
            && rule.at_least <= size
            && rule.below.is_none_or(|below| size < below)
    };
    rules.iter().rev().find(applies).map(|rule| rule.run_as)
}

#[test]
fn random_programs_compute_what_they_do_with_casts_by_hand() {
    for_each_device(|device| {
        for seed in 0..60 {
            let mut rng = Rng::new(seed);
            let rules: Vec<_> = (0..1 + rng.below(12)).map(|_| random_rule(&mut rng)).collect();
            let size = [1 + rng.below(3) as i64, 1 + rng.below(6) as i64];
            let shape = [size[0], size[1], size[1]];
            let program: Vec<_> = (0..1 + rng.below(8)).map(|_| *rng.pick(OPERATORS)).collect();
            let run = |step: &dyn Fn(&str, &Tensor, &Tensor) -> Tensor| {
                let (x, w) = (random(device, 2, &shape), random(device, 3, &shape));
                let last = program.iter().fold(x.shallow_clone(), |x, name| step(name, &x, &w));
                last.to_kind(F32).square().sum(F32).backward();
                (last.kind(), [last.detach(), gradient(&x), gradient(&w)])
            };
            let planned = region(device, rules.clone());
            let ours = run(&|name, x, w| planned.run(|| apply(name, x, w)).unwrap());
            let theirs = run(&|name, x, w| {
                apply_by_hand(device, name, found(&rules, name, size_of(name, size)), x, w)
            });
            assert_eq!(ours.0, theirs.0, "seed {seed}: {program:?} with {rules:?}");
            for (ours, theirs) in ours.1.iter().zip(&theirs.1) {
                let same = ours.allclose(theirs, 0.0, 0.0, true);
                assert!(same, "seed {seed}: {program:?} with {rules:?}: {ours:?}, {theirs:?}");
            }
        }
    });
}

/// A call of attention.
#[derive(Debug, Clone, Copy)]
struct Options {
    mask: &'static str,
    scale: Option<f64>,
    dropout: f64,
    grouped: bool,
    transposed: bool,
    dims: usize,
}

const MASKS: &[&str] = &[
    "none",
    "causal",
    "boolean",
    "boolean of batches",
    "numbers",
    "large numbers",
    "a number for each row",
    "padding",
    "padding by a large number",
];

/// Those that need the dimension of batches.
const OF_BATCHES: [&str; 3] = ["boolean of batches", "padding", "padding by a large number"];

/// Whether keys are shared by groups of heads, whether the operands are transposed, and their number of dimensions.
const LAYOUTS: [(bool, bool, usize); 5] =
    [(false, false, 4), (false, true, 4), (true, true, 4), (true, false, 3), (false, false, 2)];

fn all_options() -> Vec<Options> {
    let mut all = Vec::new();
    for &mask in MASKS {
        for scale in [None, Some(0.75), Some(-0.5)] {
            for dropout in [0.0, 0.5] {
                all.extend(LAYOUTS.map(|(grouped, transposed, dims)| Options {
                    mask,
                    scale,
                    dropout,
                    grouped,
                    transposed,
                    dims,
                }));
            }
        }
    }
    all.retain(|options| options.dims == 4 || !OF_BATCHES.contains(&options.mask));
    all
}

const HEADS: i64 = 4;
const QUERIES: i64 = 5;
const KEYS: i64 = 7;
const WIDTH: i64 = 8;

/// Queries, keys, values and the gradient of the result, which bf16 has exactly.
fn inputs(options: Options) -> [Tensor; 4] {
    let kv_heads = if options.grouped { 2 } else { HEADS };
    let rows = [(HEADS, QUERIES), (kv_heads, KEYS), (kv_heads, KEYS), (HEADS, QUERIES)];
    let mut seed = 10;
    rows.map(|(heads, length)| {
        seed += 1;
        tch::manual_seed(seed);
        let batch = [2, heads];
        let before = &batch[4 - options.dims..];
        let mut size = [before, &[length, WIDTH]].concat();
        if options.transposed {
            size.swap(1, 2);
        }
        let t = Tensor::randn(size, (F32, Device::Cpu)).to_kind(BF16).to_kind(Kind::Double);
        if options.transposed { t.transpose(1, 2) } else { t }
    })
}

/// What BERT adds to the scores of padding.
const PADDING: f64 = -10_000.0;

/// A mask, of which some rows have no key: booleans, or numbers that f32 has exactly.
fn mask(options: Options) -> Option<Tensor> {
    tch::manual_seed(20);
    let drawn = |size: &[i64]| Tensor::randn(size, (F32, Device::Cpu));
    let rows = |keep: Tensor| {
        let _filled = keep.select(-2, 1).fill_(0);
        keep
    };
    let infinity = f64::INFINITY;
    match options.mask {
        "none" | "causal" => None,
        "boolean" => Some(rows(drawn(&[QUERIES, KEYS]).gt(-0.5))),
        "boolean of batches" => Some(rows(drawn(&[2, 1, QUERIES, KEYS]).gt(-0.5))),
        "numbers" => {
            let numbers = drawn(&[QUERIES, KEYS]).to_kind(BF16).to_kind(Kind::Double);
            let _filled = numbers.select(-2, 2).fill_(-infinity);
            Some(numbers)
        }
        // Beside which bf16 has no digits left for the scores.
        "large numbers" => Some((drawn(&[QUERIES, KEYS]) - 300).to_kind(Kind::Double)),
        "a number for each row" => {
            let numbers = drawn(&[QUERIES, 1]) * 10_000;
            Some(numbers.to_kind(Kind::Double))
        }
        name => {
            let left_out = if name == "padding" { -infinity } else { PADDING };
            let keys = Tensor::arange(KEYS, (Kind::Int64, Device::Cpu));
            let lengths = Tensor::from_slice(&[3i64, 0]).view([2, 1, 1, 1]);
            let zero = Tensor::zeros([2, 1, 1, KEYS], (Kind::Double, Device::Cpu));
            Some(zero.masked_fill(&keys.ge_tensor(&lengths), left_out))
        }
    }
}

/// The result, its gradients and that of a mask of numbers, and bounds of the errors of all of them.
struct Reference {
    tensors: Vec<Tensor>,
    bounds: Vec<Tensor>,
}

/// The numbers of a mask that count: how far each is below the largest of its row. A number far below is that of a key
/// that is left out.
fn lowered(mask: &Tensor) -> Tensor {
    let largest = mask.amax(-1, true);
    let lowered = mask - largest.masked_fill(&largest.isinf(), 0.0);
    lowered.masked_fill(&lowered.lt(PADDING / 2.0), 0.0)
}

/// Attention in f64 by libtorch, with the factors of a dropout, and how far bf16 may be from it.
///
/// With u, the unit roundoff of bf16: the sum of a score and its mask, less the largest of the row, of which each is
/// rounded at most twice, is off by at most d = 4 u (|s| + |m|), so that a probability has a relative error of at most
/// exp(2 d) (1 + u) - 1. The products with values, and in the backward pass with gradients, add u for each result that
/// is kept in bf16, of which there are fewer than ten from the scores to the gradients.
fn reference(
    options: Options,
    inputs: &[Tensor; 4],
    mask: Option<&Tensor>,
    factors: &Tensor,
) -> Reference {
    let leaves = inputs.each_ref().map(|t| t.detach().copy().set_requires_grad(true));
    let [q, k, v, up] = &leaves;
    // This operator of libtorch's takes numbers alone.
    let mask = mask.map(|mask| match mask.kind() {
        Kind::Bool => {
            mask.zeros_like().to_kind(Kind::Double).masked_fill(&mask.logical_not(), -f64::INFINITY)
        }
        _ => mask.detach().copy().set_requires_grad(true),
    });
    let mask = mask.as_ref();
    let scale = options.scale.unwrap_or(1.0 / (WIDTH as f64).sqrt());
    let repeat = |t: &Tensor| match options.grouped {
        true => t.repeat_interleave_self_int(HEADS / 2, -3, None),
        false => t.shallow_clone(),
    };
    let kept = factors.ne(0.0);
    let call = |q: &Tensor, v: &Tensor, dropout: f64| {
        let kept = (dropout > 0.0).then_some(&kept);
        let causal = options.mask == "causal";
        let scale = Some(scale);
        Tensor::internal_scaled_dot_product_attention_math(
            q,
            k,
            v,
            mask,
            dropout,
            causal,
            kept,
            scale,
            options.grouped,
        )
    };
    let (out, _) = call(q, v, options.dropout);
    (&out * up.detach()).sum(Kind::Double).backward();
    let (_, probabilities) = call(&q.detach(), &v.detach(), 0.0);
    let probabilities = probabilities.detach();
    let [aq, ak, av, aup] = inputs.each_ref().map(Tensor::abs);
    let (ak, av) = (repeat(&ak), repeat(&av));
    let mut scores = aq.matmul(&ak.transpose(-2, -1)) * scale.abs();
    if let Some(numbers) = mask {
        scores += lowered(&numbers.detach()).abs();
    }
    let unit = 2f64.powi(-8);
    let d = 4.0 * unit * scores.max().double_value(&[]);
    let bound = (4.0 * d).exp() * (1.0 + unit).powi(10) - 1.0;
    let dropped = &probabilities * factors;
    let through = aup.matmul(&av.transpose(-2, -1)) * factors;
    let sum = (&through * &probabilities).sum_dim_intlist(-1, true, None::<Kind>);
    let inner = &probabilities * (through + sum);
    let ungroup = |t: Tensor| match options.grouped {
        true => {
            let mut size = t.size();
            let heads = size.len() - 3;
            size.splice(heads..=heads, [2, HEADS / 2]);
            t.view(&size[..]).sum_dim_intlist(heads as i64 + 1, false, None::<Kind>)
        }
        false => t,
    };
    let mut bounds = vec![
        dropped.matmul(&av),
        inner.matmul(&ak) * scale.abs(),
        ungroup(inner.transpose(-2, -1).matmul(&aq) * scale.abs()),
        ungroup(dropped.transpose(-2, -1).matmul(&aup)),
    ];
    let mut tensors = vec![out.detach(), q.grad(), k.grad(), v.grad()];
    if let Some(mask) = mask.filter(|mask| mask.requires_grad()) {
        bounds.push(inner.sum_to_size(mask.size()));
        tensors.push(mask.grad());
    }
    Reference { tensors, bounds: bounds.into_iter().map(|b| b * bound).collect() }
}

#[test]
fn composed_attention_means_what_libtorchs_means() {
    for_each_device(|device| {
        let planned = region(device, vec![Rule::new(SDPA, COMPOSED)]);
        for options in all_options() {
            let inputs = inputs(options);
            let mask = mask(options);
            let on_device = |t: &Tensor| {
                let t = if t.kind() == Kind::Double { t.to_kind(F32) } else { t.shallow_clone() };
                t.to_device(device)
            };
            let leaves = inputs.each_ref().map(|t| on_device(t).set_requires_grad(true));
            let [q, k, v, up] = &leaves;
            let mask_here = mask.as_ref().map(&on_device);
            let mask_here = mask_here.map(|mask| {
                let is_numbers = mask.kind() != Kind::Bool;
                mask.set_requires_grad(is_numbers)
            });
            tch::manual_seed(30);
            let call = || {
                Tensor::scaled_dot_product_attention(
                    q,
                    k,
                    v,
                    mask_here.as_ref(),
                    options.dropout,
                    options.mask == "causal",
                    options.scale,
                    options.grouped,
                )
            };
            let out = planned.run(call).unwrap();
            assert_eq!(out.kind(), BF16, "{options:?}");
            (&out * up.detach().to_kind(BF16)).sum(F32).backward();
            // The factors by which the dropout has multiplied.
            let batch = if options.dims == 2 { 1 } else { q.numel() as i64 / (QUERIES * WIDTH) };
            let ones = Tensor::ones([batch, QUERIES, KEYS], (BF16, device));
            tch::manual_seed(30);
            let factors = match options.dropout > 0.0 {
                true => ones.dropout(options.dropout, true),
                false => ones,
            };
            let mut size = q.size();
            *size.last_mut().unwrap() = KEYS;
            let factors = factors.to_device(Device::Cpu).to_kind(Kind::Double).view(&size[..]);
            let wanted = reference(options, &inputs, mask.as_ref(), &factors);
            let mut found = vec![out.detach(), q.grad(), k.grad(), v.grad()];
            found.extend(mask_here.iter().filter(|m| m.requires_grad()).map(Tensor::grad));
            assert_eq!(found.len(), wanted.tensors.len());
            for ((found, wanted), bound) in found.iter().zip(&wanted.tensors).zip(&wanted.bounds) {
                let found = found.to_device(Device::Cpu).to_kind(Kind::Double);
                assert_eq!(found.size(), wanted.size(), "{options:?}");
                let excess = ((found - wanted).abs() - bound).max().double_value(&[]);
                assert!(excess <= 0.0, "{options:?}: {excess}");
            }
            if options.mask == "boolean" {
                assert_eq!(out.select(-2, 1).abs().max().double_value(&[]), 0.0, "{options:?}");
            }
        }
    });
}

#[test]
fn attention_is_composed_up_to_a_limit_of_memory() {
    for_each_device(|device| {
        let [q, k, v] = [1, 2, 3].map(|seed| random(device, seed, &[6, 5, 4]));
        let of = |most_bytes| {
            let rule = Rule::new(SDPA, RunAs::Composed { most_bytes });
            region(device, vec![rule]).run(|| attention(&q, &k, &v)).unwrap()
        };
        let plain = Autocast::new(device).dtype(BF16).run(|| attention(&q, &k, &v)).unwrap();
        let composed = composed_by_hand(&q, &k, &v);
        assert_ne!(plain, composed);
        let bytes = 6 * 5 * 5 * 2;
        assert_eq!(of(bytes), composed);
        assert_eq!(of(bytes - 1), plain);
    });
}

/// The rules before it count, and then autocast's lists: also for what libtorch refuses.
#[test]
fn what_cannot_be_composed_runs_as_without_the_rule() {
    for_each_device(|device| {
        let t = |seed, size: &[i64]| random(device, seed, size);
        let region = region(device, vec![Rule::new(SDPA, RunAs::F32), Rule::new(SDPA, COMPOSED)]);
        let plain = Autocast::new(device).dtype(BF16);
        let call = |region: Autocast, [q, k, v]: [&Tensor; 3], grouped| {
            let call = || {
                let none = None::<&Tensor>;
                Tensor::f_scaled_dot_product_attention(q, k, v, none, 0.0, false, None, grouped)
            };
            region.run(call).unwrap().map_err(|error| error.to_string())
        };
        let double = t(1, &[2, 3, 4]).to_kind(Kind::Double);
        let found = call(region, [&double, &double, &double], false).unwrap();
        assert_eq!(found, call(plain, [&double, &double, &double], false).unwrap());
        let q = t(1, &[2, 6, 3, 4]);
        for (k, v, grouped) in [
            (t(2, &[2, 6, 5, 7]), t(3, &[2, 6, 5, 4]), false),
            (t(2, &[2, 4, 5, 4]), t(3, &[2, 4, 5, 4]), false),
            (t(2, &[2, 4, 5, 4]), t(3, &[2, 4, 5, 4]), true),
        ] {
            assert!(call(region, [&q, &k, &v], grouped).is_err(), "{:?}", k.size());
        }
        let short = t(4, &[2, 0, 4]);
        assert_eq!(call(region, [&short, &short, &short], false).unwrap().kind(), F32);
        // Batches are broadcast.
        let one = t(5, &[1, 3, 4]);
        let many = t(6, &[2, 3, 4]);
        let expanded = one.expand([2, 3, 4], false);
        let found = call(region, [&many, &one, &one], false).unwrap();
        assert_eq!(found, composed_by_hand(&many, &expanded, &expanded));
    });
}

/// libtorch refuses a mask beside `is_causal`. Under a rule, too, neither of the two is dropped.
#[test]
fn a_mask_beside_is_causal_is_answered_as_without_the_rule() {
    for_each_device(|device| {
        let planned = region(device, vec![Rule::new(SDPA, COMPOSED)]);
        let [q, k, v] = [1, 2, 3].map(|seed| random(device, seed, &[2, 4, 5, 8]));
        for mask in [
            Tensor::ones([5, 5], (Kind::Bool, device)).triu(0),
            Tensor::zeros([2, 1, 1, 5], (F32, device)).masked_fill(
                &Tensor::from_slice(&[false, true, false, false, true]).to_device(device),
                -1.5,
            ),
        ] {
            let call = |region: Autocast| {
                let call = || {
                    let mask = Some(&mask);
                    Tensor::f_scaled_dot_product_attention(&q, &k, &v, mask, 0.0, true, None, false)
                };
                let found = region.run(call).unwrap();
                // What follows the first line says where in libtorch the error was made.
                found.map_err(|error| error.to_string().lines().next().map(str::to_owned))
            };
            assert_eq!(call(planned), call(Autocast::new(device).dtype(BF16)), "{mask:?}");
        }
    });
}

#[test]
fn the_width_of_the_values_is_no_part_of_the_scale() {
    for_each_device(|device| {
        let planned = region(device, vec![Rule::new(SDPA, COMPOSED)]);
        for width in [1, 3, 32] {
            let computed = |attention: &dyn Fn(&[Tensor; 3]) -> Tensor| {
                let sizes: [&[i64]; 3] = [&[2, 5, 8], &[2, 7, 8], &[2, 7, width]];
                let leaves = [0, 1, 2].map(|i| random(device, i as i64, sizes[i]));
                let result = attention(&leaves);
                assert_eq!(result.size(), [2, 5, width]);
                result.square().sum(F32).backward();
                (result.detach(), leaves.map(|leaf| leaf.grad()))
            };
            let found = computed(&|[q, k, v]| planned.run(|| attention(q, k, v)).unwrap());
            let by_hand = computed(&|[q, k, v]| composed_by_hand(q, k, v));
            assert_eq!(found, by_hand, "{width}");
        }
    });
}

/// Losses of 200 steps of an attention with a projection, in f32, in bf16 and in bf16 with rules.
#[test]
fn training_with_a_plan_is_as_near_to_f32_as_without() {
    for_each_device(|device| {
        let x = random(device, 1, &[4, 8, 16]).detach();
        let target = (x.tanh() * 0.5).roll([1], [1]);
        let losses = |region: Autocast| {
            let w = random(device, 2, &[16, 48]);
            let w = (w.detach() * 0.2).set_requires_grad(true);
            let mut opt = AdamW::default().build(&[w.shallow_clone()], 3e-3).unwrap();
            let losses = (0..200).map(|_| {
                let loss = region.run(|| {
                    let qkv = x.matmul(&w).chunk(3, -1);
                    let ys = attention(&qkv[0], &qkv[1], &qkv[2]);
                    ys.to_kind(F32).mse_loss(&target, Reduction::Mean)
                });
                let loss = loss.unwrap();
                opt.zero_grad().unwrap();
                loss.backward();
                opt.step().unwrap();
                loss.double_value(&[])
            });
            losses.collect::<Vec<_>>()
        };
        let exact = losses(Autocast::new(device).enabled(false));
        assert!(exact[199] < 0.7 * exact[0], "{} to {}", exact[0], exact[199]);
        let rules = vec![Rule::new(SDPA, COMPOSED), Rule::new("softmax", RunAs::Half)];
        let distance = |region: Autocast| {
            let pairs = losses(region).into_iter().zip(&exact);
            pairs.map(|(loss, exact)| (loss / exact - 1.0).abs()).fold(0.0, f64::max)
        };
        let without = distance(region(device, Vec::new()));
        let with = distance(region(device, rules));
        assert!(with <= 2.0 * without.max(1e-3), "{with} with the plan, {without} without");
    });
}

#[test]
fn plans_nest_and_are_captured() {
    let [q, k, v] = [1, 2, 3].map(|seed| random(Device::Cpu, seed, &[2, 5, 4]));
    let composed = composed_by_hand(&q, &k, &v);
    let planned = region(Device::Cpu, vec![Rule::new(SDPA, COMPOSED)]);
    planned
        .run(|| {
            assert_eq!(attention(&q, &k, &v), composed);
            let inner = Autocast::new(Device::Cpu).prefer_half(["exp"]);
            assert_eq!(inner.run(|| attention(&q, &k, &v)).unwrap(), composed);
            let kept = Autocast::new(Device::Cpu).keep_in_f32([SDPA]);
            assert_eq!(kept.run(|| attention(&q, &k, &v)).unwrap().kind(), F32);
            let short = Rule { below: Some(5), ..Rule::new(SDPA, RunAs::F32) };
            let short = region(Device::Cpu, vec![short]);
            assert_eq!(short.run(|| attention(&q, &k, &v)).unwrap(), composed);
            let off = Autocast::new(Device::Cpu).plan(&Plan::new(Device::Cpu).unwrap()).unwrap();
            assert_eq!(off.run(|| attention(&q, &k, &v)).unwrap().kind(), F32);

            let state = AutocastState::current().unwrap();
            let here = [&q, &k, &v].map(Tensor::shallow_clone);
            let elsewhere = move || state.run(|| attention(&here[0], &here[1], &here[2])).unwrap();
            assert_eq!(std::thread::spawn(elsewhere).join().unwrap(), composed);
        })
        .unwrap();
    assert_eq!(seen(), OUTSIDE);
}

#[test]
fn a_plan_holds_where_it_was_made() {
    let plan = Plan { dtype: Some(BF16), ..Plan::new(Device::Cpu).unwrap() };
    let refused = |change: &dyn Fn(&mut Plan)| {
        let mut plan = plan.clone();
        change(&mut plan);
        match Autocast::new(Device::Cpu).plan(&plan) {
            Err(Error::Autocast(AutocastError::PlanElsewhere { plan, here })) => (plan, here),
            other => panic!("{other:?}"),
        }
    };
    let (there, here) = refused(&|plan| plan.platform.libtorch = "1.0.0".into());
    assert!(there.contains("libtorch 1.0.0") && !here.contains("1.0.0"), "{there}, {here}");
    let (there, _) = refused(&|plan| plan.platform.threads = Some(1000));
    assert!(there.ends_with(", 1000 threads"), "{there}");
    refused(&|plan| plan.platform.device = "cuda".into());
    refused(&|plan| plan.platform.bf16_is_native ^= true);
    let threads = tch::get_num_threads();
    assert_eq!(plan.platform.threads, u64::try_from(threads).ok());
    let gone = Autocast::new(Device::Cuda(99)).plan(&plan);
    assert!(matches!(gone, Err(Error::DeviceUnavailable { .. })), "{gone:?}");
}

/// The dtype of a product of f32 tensors in a region.
fn product(region: Autocast) -> Kind {
    let x = Tensor::ones([2, 2], (F32, Device::Cpu));
    region.run(|| x.matmul(&x)).unwrap().kind()
}

#[test]
fn a_plan_switches_a_region_on_or_off_and_the_last_call_wins() {
    let plan = |dtype| Plan { dtype, ..Plan::new(Device::Cpu).unwrap() };
    let (f32, bf16, fp16) = (plan(None), plan(Some(BF16)), plan(Some(Kind::Half)));
    let new = Autocast::new(Device::Cpu);
    let cases = [
        ("off, then bf16", new.enabled(false).plan(&bf16).unwrap(), BF16),
        ("f32, then bf16", new.plan(&f32).unwrap().plan(&bf16).unwrap(), BF16),
        ("bf16, then f32", new.plan(&bf16).unwrap().plan(&f32).unwrap(), F32),
        ("bf16, then fp16", new.plan(&bf16).unwrap().plan(&fp16).unwrap(), Kind::Half),
        ("bf16, then off", new.plan(&bf16).unwrap().enabled(false), F32),
        ("f32, then on", new.dtype(Kind::Half).plan(&f32).unwrap().enabled(true), Kind::Half),
        ("bf16, then a dtype", new.plan(&bf16).unwrap().dtype(Kind::Half), Kind::Half),
        ("a dtype, then bf16", new.dtype(Kind::Half).plan(&bf16).unwrap(), BF16),
        ("f32, then a dtype", new.plan(&f32).unwrap().dtype(Kind::Half), F32),
        ("a dtype, then f32", new.dtype(Kind::Half).plan(&f32).unwrap(), F32),
    ];
    for (what, region, wanted) in cases {
        assert_eq!(product(region), wanted, "{what}");
        // Also inside of a region of another dtype.
        let around = new.dtype(Kind::Half);
        assert_eq!(around.run(|| product(region)).unwrap(), wanted, "{what}");
    }
    assert_eq!(seen(), OUTSIDE);
}

#[test]
fn a_plan_means_the_same_for_a_region_and_for_a_mixed_precision() {
    let plans = [None, Some(BF16), Some(Kind::Half)]
        .map(|dtype| Plan { dtype, ..Plan::new(Device::Cpu).unwrap() });
    for amp in [Amp::Off, Amp::Bf16, Amp::Fp16] {
        for first in &plans {
            for last in &plans {
                let amp = amp.on(Device::Cpu).unwrap();
                let both = |amp: MixedPrecision| amp.plan(first).and_then(|amp| amp.plan(last));
                let planned = both(amp.clone()).unwrap();
                let region = amp.region().plan(first).and_then(|region| region.plan(last));
                let wanted = last.dtype.unwrap_or(F32);
                assert_eq!(product(planned.region()), wanted, "{amp}, {first}, {last}");
                assert_eq!(product(region.unwrap()), wanted, "{amp}, {first}, {last}");
                assert_eq!(planned.dtype(), last.dtype);
                assert_eq!(planned.needs_scaling(), wanted == Kind::Half);
            }
        }
    }
}

/// A plan in f32 in between, whose rules have no effect while the region is off, forgets nothing.
#[test]
fn a_plan_adds_to_the_rules_of_a_region() {
    let f32 = Plan::new(Device::Cpu).unwrap();
    let rules = vec![Rule::new("exp", RunAs::F32), Rule::new("tanh", RunAs::Half)];
    let plan = Plan { dtype: Some(BF16), rules, ..f32.clone() };
    let region = Autocast::new(Device::Cpu).keep_in_f32(["matmul", "tanh"]);
    let x = Tensor::ones([2, 2], (F32, Device::Cpu));
    for planned in [region.plan(&plan), region.plan(&f32).and_then(|off| off.plan(&plan))] {
        let planned = planned.unwrap();
        assert_eq!(product(planned), F32);
        let (kept, other) = planned.run(|| (x.mm(&x).exp().kind(), x.tanh().kind())).unwrap();
        assert_eq!((kept, other), (F32, BF16));
        let again = planned.prefer_half(["exp"]);
        assert_eq!(again.run(|| x.exp().kind()).unwrap(), BF16);
    }
}

#[test]
fn plans_are_data() {
    let rules = vec![
        Rule { at_least: 3, below: Some(9), ..Rule::new("linear", RunAs::F32) },
        Rule::new(SDPA, RunAs::Composed { most_bytes: 1 << 20 }),
        Rule { at_least: 5, ..Rule::new("softmax", RunAs::Half) },
    ];
    for dtype in [None, Some(BF16), Some(Kind::Half)] {
        let plan = Plan { dtype, rules: rules.clone(), ..Plan::new(Device::Cpu).unwrap() };
        let text = serde_json::to_string(&plan).unwrap();
        assert_eq!(serde_json::from_str::<Plan>(&text).unwrap(), plan, "{text}");
    }
    let plan = Plan { dtype: Some(BF16), rules, ..Plan::new(Device::Cpu).unwrap() };
    let text = plan.to_string();
    let lines: Vec<_> = text.lines().collect();
    assert!(lines[0].starts_with("bf16 on cpu with"), "{text}");
    assert_eq!(
        lines[1..],
        [
            "  linear of size 3 to below 9: in f32",
            "  scaled_dot_product_attention: composed, up to 1 MiB",
            "  softmax of size 5 or more: in half precision",
        ]
    );
    let wrong = Plan { dtype: Some(F32), ..plan.clone() };
    assert!(serde_json::to_string(&wrong).is_err());
    let text = serde_json::to_string(&plan).unwrap().replace("bf16\"", "fp8\"");
    assert!(serde_json::from_str::<Plan>(&text).is_err(), "{text}");
    let wrong = refusal(Autocast::new(Device::Cpu).plan(&wrong).unwrap());
    assert!(matches!(wrong, AutocastError::Dtype { .. }), "{wrong:?}");
}

/// Reads a plan with a rule, which is in the form of a file.
fn read_rule(rule: &str) -> Result<Plan, String> {
    let platform = serde_json::to_string(&Plan::new(Device::Cpu).unwrap().platform).unwrap();
    let text =
        format!(r#"{{"_version": 1, "platform": {platform}, "dtype": "bf16", "rules": [{rule}]}}"#);
    serde_json::from_str(&text).map_err(|error| error.to_string())
}

#[test]
fn a_misspelled_key_of_a_plan_is_refused_with_the_nearest_one() {
    let known = r#"{"operator": "exp", "run_as": "f32", "at_least": 1, "below": 2}"#;
    assert!(read_rule(known).is_ok());
    let composed = r#"{"operator": "exp", "run_as": {"composed": {"most_bytes": 7}}}"#;
    assert!(read_rule(composed).is_ok());
    for (rule, unknown, nearest) in [
        (known.replace("below", "bellow"), "bellow", "below"),
        (known.replace("at_least", "atleast"), "atleast", "at_least"),
        (known.replace("operator", "operater"), "operater", "operator"),
        (known.replace("\"f32\"", "\"f23\""), "f23", "f32"),
        (composed.replace("most_bytes", "most_byte"), "most_byte", "most_bytes"),
    ] {
        let said = format!("`{unknown}`, did you mean `{nearest}`? expected ");
        assert_says(read_rule(&rule), &said);
    }
    assert_says(
        serde_json::from_str::<Rule>(&known.replace("below", "bellow")),
        "did you mean `below`?",
    );
    let plan = serde_json::to_string(&Plan::new(Device::Cpu).unwrap()).unwrap();
    for (key, other, said) in [
        ("rules", "rule", "`rule`, did you mean `rules`?"),
        ("dtype", "dytpe", "`dytpe`, did you mean `dtype`?"),
        ("threads", "thread", "`thread`, did you mean `threads`?"),
        ("_version", "version", "`version`, did you mean `_version`?"),
        (
            "rules",
            "x",
            "unknown field `x`, expected one of `_version`, `platform`, `dtype`, `rules`",
        ),
    ] {
        let text = plan.replacen(&format!("\"{key}\""), &format!("\"{other}\""), 1);
        assert_says(serde_json::from_str::<Plan>(&text), said);
    }
    let twice = known.replace("\"at_least\": 1", "\"below\": 1");
    assert_says(read_rule(&twice), "duplicate field `below`");
}

#[test]
fn a_misspelled_key_of_a_plan_in_a_checkpoint_is_named() {
    let plan = Plan { dtype: Some(BF16), ..Plan::new(Device::Cpu).unwrap() };
    let mut checkpoint = Checkpoint::new();
    checkpoint.add_value("plan", &plan).unwrap();
    assert_eq!(checkpoint.value::<Plan>("plan").unwrap(), plan);
    let mut other = serde_json::to_value(&plan).unwrap();
    other["dytpe"] = other["dtype"].take();
    checkpoint.add_value("other", &other).unwrap();
    assert_says(checkpoint.value::<Plan>("other"), "`dytpe`, did you mean `dtype`?");
    // The version is read first, whatever else is unknown.
    other["_version"] = 2.into();
    checkpoint.add_value("newer", &other).unwrap();
    assert_says(
        checkpoint.value::<Plan>("newer"),
        "has version 2, and this build of tch-amp reads plans up to",
    );
}

#[test]
fn a_plan_has_a_version_and_a_newer_one_is_refused() {
    let rules = vec![Rule { below: Some(9), ..Rule::new("linear", RunAs::F32) }];
    let plan = Plan { dtype: Some(BF16), rules, ..Plan::new(Device::Cpu).unwrap() };
    let text = serde_json::to_string(&plan).unwrap();
    assert!(text.starts_with(r#"{"_version":1,"#), "{text}");
    let read = |text: &str| serde_json::from_str::<Plan>(text).map_err(|error| error.to_string());
    // Builds from before the version wrote none.
    assert_eq!(read(&text.replace(r#""_version":1,"#, "")), Ok(plan));
    let newer = text.replace(r#""_version":1,"#, r#""_version":2,"colour":"red","#);
    assert_says(read(&newer), "has version 2, and this build of tch-amp reads plans up to");
    for wrong in ["-1", "1.5", "null", "\"1\""] {
        let text = text.replace("\"_version\":1", &format!("\"_version\":{wrong}"));
        assert!(read(&text).is_err(), "{text}");
    }
}

#[test]
fn a_rule_for_no_size_is_refused() {
    let rule = |at_least, below| Rule { at_least, below, ..Rule::new("exp", RunAs::F32) };
    for (at_least, below) in [(0, 0), (5, 5), (6, 5), (u64::MAX, u64::MAX)] {
        let empty = rule(at_least, Some(below));
        let text = serde_json::to_string(&empty).unwrap();
        let said =
            format!("holds for no size, because it begins at {at_least} and ends below {below}");
        assert_says(serde_json::from_str::<Rule>(&text), &said);
        assert_says(read_rule(&text), &said);
        for dtype in [None, Some(BF16)] {
            let rules = vec![rule(0, None), empty.clone()];
            let plan = Plan { dtype, rules, ..Plan::new(Device::Cpu).unwrap() };
            for refused in [
                Autocast::new(Device::Cpu).plan(&plan).map(drop),
                Amp::Bf16.on(Device::Cpu).unwrap().plan(&plan).map(drop),
            ] {
                assert!(
                    matches!(&refused, Err(Error::Autocast(AutocastError::EmptyRange { operator, .. })) if operator == "exp"),
                    "{refused:?}"
                );
            }
        }
    }
    for (at_least, below) in [(0, Some(1)), (5, Some(6)), (5, None), (u64::MAX, None)] {
        let rule = rule(at_least, below);
        let text = serde_json::to_string(&rule).unwrap();
        assert_eq!(serde_json::from_str::<Rule>(&text).unwrap(), rule);
    }
}

/// In a region that is off as well: a misspelled name must not wait until the region is on.
#[test]
fn rules_that_cannot_be_are_refused() {
    let cannot = [
        ("matmul", COMPOSED, "cannot be composed"),
        ("no_such_operator", RunAs::F32, "has no operator"),
        ("add_", RunAs::F32, "cannot cast the inputs"),
    ];
    for (name, run_as, said) in cannot {
        let rule = Rule { below: Some(2), ..Rule::new(name, run_as) };
        for dtype in [None, Some(BF16)] {
            let plan = Plan { dtype, rules: vec![rule.clone()], ..Plan::new(Device::Cpu).unwrap() };
            let planned = Autocast::new(Device::Cpu).plan(&plan).unwrap();
            let amp = Amp::Bf16.on(Device::Cpu).unwrap().plan(&plan).unwrap();
            for region in [planned, planned.enabled(false), amp.region()] {
                let error = refusal(region);
                let is_right = match error {
                    AutocastError::NotComposable { .. } => run_as == COMPOSED,
                    AutocastError::UnknownOperator { .. } => name == "no_such_operator",
                    AutocastError::NotOverridable { .. } => name == "add_",
                    _ => false,
                };
                assert!(is_right && error.to_string().contains(said), "{error}");
                assert!(region.run(|| ()).is_err());
            }
        }
    }
    assert_eq!(seen(), OUTSIDE);
}

#[test]
fn the_operators_of_a_region_that_is_off_must_exist() {
    for device in [Device::Cpu, Device::Cuda(99)] {
        let off = Autocast::new(device).enabled(false);
        assert!(off.run(|| ()).is_ok());
        assert!(off.keep_in_f32(["exp"]).prefer_half(["tanh"]).run(|| ()).is_ok());
        for region in [off.keep_in_f32(["sofmax"]), off.prefer_half(["sofmax"])] {
            assert!(region.run(|| ()).is_err());
            let error = refusal(region);
            let is_right = matches!(&error, AutocastError::UnknownOperator { operator } if operator == "aten::sofmax");
            assert!(is_right, "{error}");
        }
        // It changes nothing for the operators that it names.
        let x = Tensor::ones([2], (F32, Device::Cpu));
        let around = Autocast::new(Device::Cpu).dtype(BF16).prefer_half(["exp"]);
        let kept = off.keep_in_f32(["exp", "tanh"]);
        around
            .run(|| {
                let inside = kept.run(|| x.exp().kind()).unwrap();
                let wanted = if device == Device::Cpu { F32 } else { BF16 };
                assert_eq!((inside, x.exp().kind()), (wanted, BF16));
            })
            .unwrap();
    }
    assert_eq!(seen(), OUTSIDE);
}
