//! A window that a checkpoint interrupts.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;

use serde::Serialize;
use tch::nn::VarStore;
use tch::{Device, Kind, Tensor};
use tch_amp::GradScaler;
use tch_amp::accumulation::Accumulation;
use tch_amp::checkpoint::{Checkpoint, Stateful};
use tch_amp::optim::{MasterWeights, Optimizer, Sgd};
use tch_amp::scaler::GradScalerConfig;

use testkit::bits::bits;
use testkit::checkpoints::checkpoint_of;
use testkit::files::Folder;
use testkit::rng::Rng;
use testkit::{assert_says, to_f64};

/// Everything that a run has.
struct Run {
    vs: VarStore,
    w: Tensor,
    unused: Tensor,
    opt: Optimizer,
    scaler: GradScaler,
    window: Accumulation,
}

/// How a run is made and trained.
#[derive(Clone, Debug)]
struct Case {
    kind: Kind,
    /// Whether the gradients of half-precision parameters are f32.
    in_f32: bool,
    drops: bool,
    /// The weights and the factors of the micro-batches.
    batches: Vec<(f64, f64)>,
}

impl Case {
    fn random(rng: &mut Rng) -> Self {
        let kind = *rng.pick(&[Kind::Float, Kind::Double, Kind::BFloat16, Kind::Half]);
        let (drops, in_f32) = (rng.below(2) == 0, rng.below(2) == 0);
        let bad = [f64::NAN, f64::INFINITY];
        let batches = (0..1 + rng.below(5)).map(|_| {
            let weight = 1.0 + rng.below(9) as f64;
            match drops && rng.below(3) == 0 {
                true => (weight, *rng.pick(&bad)),
                false => (weight, (rng.below(200) as f64 - 100.0) / 7.0),
            }
        });
        Self { kind, in_f32, drops, batches: batches.collect() }
    }

    fn run(&self) -> Run {
        let mut vs = VarStore::new(Device::Cpu);
        let w = vs.root().ones("w", &[3]);
        let unused = vs.root().ones("unused", &[2]);
        vs.set_kind(self.kind);
        let sgd = Sgd { momentum: 0.9, ..Default::default() };
        let mut opt = match self.in_f32 {
            true => sgd.master_weights(MasterWeights::Float).build(&vs, 0.1).unwrap(),
            false => sgd.build(&vs, 0.1).unwrap(),
        };
        if self.in_f32 {
            opt.accumulate_in_f32().unwrap();
        }
        let config =
            GradScalerConfig { init_scale: 4.0, allow_fp16_gradients: true, ..Default::default() };
        let weights: Vec<_> = self.batches.iter().map(|(weight, _)| *weight).collect();
        let window = Accumulation::of_weights(weights).unwrap();
        Run { vs, w, unused, opt, scaler: config.build(Device::Cpu).unwrap(), window }
    }
}

impl Run {
    fn take(&mut self, case: &Case, batches: Range<usize>) {
        for (_, factor) in &case.batches[batches] {
            let loss = (&self.w * &self.w * *factor).sum(Kind::Float);
            match case.drops {
                true => self.window.backward_or_drop(&mut self.scaler, &self.opt, &loss).unwrap(),
                false => self.window.backward(&mut self.scaler, &loss).unwrap(),
            }
        }
    }

    fn save(&mut self, path: &Path) {
        let mut window = self.window.with_gradients(self.vs.variables());
        let parts: [(&str, &mut dyn Stateful); 4] = [
            ("model", &mut &self.vs),
            ("opt", &mut self.opt),
            ("scaler", &mut self.scaler),
            ("window", &mut window),
        ];
        checkpoint_of(parts).save(path).unwrap();
    }

    fn restore(&mut self, path: &Path) {
        Checkpoint::load(path)
            .unwrap()
            .restore()
            .add("model", &self.vs)
            .add("opt", &mut self.opt)
            .add("scaler", &mut self.scaler)
            .add("window", self.window.with_gradients(self.vs.variables()))
            .apply()
            .unwrap();
    }

    /// The bits of the gradient, whether the unused weight has one, what was left out, and the bits of the weight after
    /// the step.
    fn finish(&mut self) -> (Vec<u8>, Kind, bool, Vec<usize>, Vec<u8>) {
        assert!(self.window.is_complete());
        let (gradient, kind) = (bits(&self.w.grad()), self.w.grad().kind());
        let dropped = self.window.dropped().unwrap();
        self.scaler.step(&mut self.opt).unwrap();
        self.scaler.update().unwrap();
        (gradient, kind, self.unused.grad().defined(), dropped, bits(&self.w))
    }
}

#[test]
fn a_window_goes_on_from_a_checkpoint_between_any_two_micro_batches() {
    let folder = Folder::new();
    let mut rng = Rng::new(18);
    for number in 0..60 {
        let case = Case::random(&mut rng);
        let count = case.batches.len();
        let mut whole = case.run();
        whole.take(&case, 0..count);
        let whole = whole.finish();
        let end = if number % 2 == 0 { "pt" } else { "safetensors" };
        let path = folder.file(&format!("{number}.{end}"));
        for place in 0..=count {
            let mut first = case.run();
            first.take(&case, 0..place);
            first.save(&path);
            let mut resumed = case.run();
            // It has been somewhere else, with a gradient that the first run lacks.
            resumed.window = Accumulation::of_equal(7).unwrap();
            resumed.unused.sum(Kind::Float).backward();
            resumed.restore(&path);
            assert_eq!(resumed.window.taken(), place, "{case:?}");
            resumed.take(&case, place..count);
            assert_eq!(resumed.finish(), whole, "{case:?}, resumed at {place}");
        }
    }
}

/// What a checkpoint has besides the gradients.
#[derive(Serialize)]
struct Progress<'a> {
    shares: &'a [f64],
    taken: usize,
    dropped: &'a [bool],
}

/// A state that is refused changes neither the window nor the gradients.
#[test]
fn what_does_not_fit_is_refused_and_changes_nothing() {
    let case = Case {
        kind: Kind::Float,
        in_f32: false,
        drops: false,
        batches: vec![(1.0, 2.0), (1.0, 3.0)],
    };
    let mut run = case.run();
    run.take(&case, 0..1);
    let gradient = to_f64(&run.w.grad());
    let mut refused = |checkpoint: &Checkpoint, expected: &str| {
        let window = run.window.with_gradients(run.vs.variables());
        assert_says(checkpoint.restore().add("window", window).apply(), expected);
        assert_eq!((run.window.taken(), run.window.micro_batches()), (1, 2), "{expected}");
        assert_eq!(to_f64(&run.w.grad()), gradient, "{expected}");
    };
    let window = |shares: &[f64], taken: usize, dropped: &[bool]| {
        let progress = Progress { shares, taken, dropped };
        let mut checkpoint = Checkpoint::new();
        checkpoint.add_value("window", &BTreeMap::from([("window", progress)])).unwrap();
        checkpoint
    };
    refused(&window(&[0.5, 0.5], 3, &[]), "taken");
    refused(&window(&[0.5, 0.5], 2, &[true]), "dropped");
    refused(&window(&[0.5, -0.5], 1, &[]), "a weight");
    refused(&window(&[0.5, f64::NAN], 1, &[]), "a weight");
    // Gradients of other parameters, of another shape and of another dtype.
    let mut other = |name: &str, gradient: Tensor, expected: &str| {
        let w = gradient.zeros_like().set_requires_grad(true);
        (&w * &gradient).sum(gradient.kind()).backward();
        let mut saved = Accumulation::of_equal(2).unwrap();
        let mut saved = saved.with_gradients([(name.to_owned(), w)]);
        refused(&checkpoint_of([("window", &mut saved)]), expected);
    };
    other("elsewhere", Tensor::from_slice(&[1f32, 2.0]), "`elsewhere`");
    other("w", Tensor::from_slice(&[1f32, 2.0]), "shape");
    other("w", Tensor::from_slice(&[1f64, 2.0, 3.0]), "Double");
}

#[test]
fn a_gradient_that_is_skipped_is_left_out() {
    let case = Case { kind: Kind::Float, in_f32: false, drops: false, batches: vec![(1.0, 2.0)] };
    let mut run = case.run();
    run.take(&case, 0..1);
    let checkpoint =
        checkpoint_of([("window", &mut run.window.with_gradients(run.vs.variables()))]);
    let mut new = case.run();
    let window = new.window.with_gradients(new.vs.variables());
    checkpoint.restore().skip(&["w"]).add("window", window).apply().unwrap();
    assert!(new.window.is_complete() && !new.w.grad().defined());
}

/// Shared weights have two names and one gradient.
#[test]
fn a_gradient_with_two_names_is_restored_once() {
    let w = Tensor::ones([2], (Kind::Float, Device::Cpu)).set_requires_grad(true);
    let named = || ["embedding", "head"].map(|name| (name.to_owned(), w.shallow_clone()));
    let mut window = Accumulation::of_equal(2).unwrap();
    window.backward(&mut GradScaler::disabled(), &(&w * 6.0).sum(Kind::Float)).unwrap();
    let checkpoint = checkpoint_of([("window", &mut window.with_gradients(named()))]);
    checkpoint.restore().add("window", window.with_gradients(named())).apply().unwrap();
    assert_eq!(to_f64(&w.grad()), [3.0, 3.0]);
}

#[test]
fn a_gradient_with_two_names_is_restored_from_any() {
    let leaf = || Tensor::ones([2], (Kind::Float, Device::Cpu)).set_requires_grad(true);
    let named = |w: &Tensor, names: &[&str]| {
        let named = names.iter().map(|name| ((*name).to_owned(), w.shallow_clone()));
        named.collect::<Vec<_>>()
    };
    let both = ["embedding", "head"];
    for saved_as in [&both[..], &both[..1], &both[1..]] {
        let (w, mut window) = (leaf(), Accumulation::of_equal(2).unwrap());
        window.backward(&mut GradScaler::disabled(), &(&w * 6.0).sum(Kind::Float)).unwrap();
        let checkpoint =
            checkpoint_of([("window", &mut window.with_gradients(named(&w, saved_as)))]);
        for skips in [None, Some("head"), Some("embedding")] {
            let new = leaf();
            let mut target = window.with_gradients(named(&new, &both));
            let restore = checkpoint.restore().skip(skips.as_slice());
            restore.add("window", &mut target).apply().unwrap();
            let gradient = new.grad();
            let got = gradient.defined().then(|| gradient.double_value(&[0]));
            let expected = skips.is_none().then_some(3.0);
            assert_eq!(got, expected, "{saved_as:?} {skips:?}");
        }
    }
}
