//! Random schedules beside PyTorch's, bit by bit.

use std::collections::BTreeMap;

use serde_json::json;
use tch_amp::checkpoint::MetricGoal;
use tch_amp::schedule::{ReduceLrOnPlateau, Schedule, Threshold};

use super::{PARTS, optimizer, part, rates, schedule};
use testkit::python::Oracle;
use testkit::rng::Rng;

struct Case {
    schedule: Schedule,
    lrs: Vec<f64>,
    adam: bool,
    steps: usize,
    /// What the program sets before a step.
    set: BTreeMap<usize, Vec<f64>>,
}

impl Case {
    fn new(schedule: Schedule, lrs: Vec<f64>, rng: &mut Rng) -> Self {
        let mut set = BTreeMap::new();
        if rng.one_in(4) {
            set.insert(rng.below(40), lrs.iter().map(|lr| lr * 0.7).collect());
        }
        Self { schedule, lrs, adam: rng.one_in(2), steps: 60, set }
    }

    /// The rates at the start and after each step.
    fn run(&self) -> Vec<Vec<[f64; 2]>> {
        let mut opt = optimizer(self.adam, &self.lrs);
        let mut scheduler = self.schedule.clone().build(&mut opt).unwrap();
        let mut all = vec![rates(&opt)];
        for step in 0..self.steps {
            for (group, &lr) in self.set.get(&step).into_iter().flatten().enumerate() {
                opt.set_lr_group(group, lr).unwrap();
            }
            scheduler.advance(&mut opt).unwrap();
            assert_eq!(scheduler.steps(), step as u64 + 1);
            let lrs: Vec<_> = rates(&opt).iter().map(|rates| rates[0]).collect();
            assert_eq!(scheduler.lrs(), lrs);
            all.push(rates(&opt));
        }
        all
    }
}

/// The bits, for a comparison that a NaN passes as well.
fn bits(rates: &[Vec<[f64; 2]>]) -> Vec<Vec<[u64; 2]>> {
    let of = |step: &Vec<[f64; 2]>| step.iter().map(|pair| pair.map(f64::to_bits)).collect();
    rates.iter().map(of).collect()
}

#[test]
fn random_schedules_have_pytorchs_numbers() {
    let Some(oracle) = Oracle::find("schedules.py") else { return };
    let mut rng = Rng::new(17);
    let base: &[f64] = &[0.1, 3e-4, 1.0];
    let mut case = |i: usize| {
        let lrs = base[..1 + rng.below(base.len())].to_vec();
        // Each kind at least some times, and then any combination.
        let schedule = match i / 6 {
            kind if kind < PARTS => part(kind, &mut rng, lrs.len()),
            _ => schedule(&mut rng, lrs.len()),
        };
        Case::new(schedule, lrs, &mut rng)
    };
    let cases: Vec<_> = (0..400).map(&mut case).collect();
    let input = cases.iter().map(|case| {
        let Case { schedule, lrs, adam, steps, set } = case;
        json!({"options": schedule, "lrs": lrs, "adam": adam, "steps": steps, "set": set})
    });
    let output = oracle.run(&[], &json!(input.collect::<Vec<_>>()).to_string());
    assert_eq!(output.lines().count(), cases.len());
    let mut negative = 0;
    for (case, line) in cases.iter().zip(output.lines()) {
        let mut theirs: Vec<Vec<[f64; 2]>> = serde_json::from_str(line).unwrap();
        let mut ours = case.run();
        // PyTorch continues with a negative learning rate, and this crate with 0.
        if let Some(step) = theirs.iter().position(|all| all.iter().any(|pair| pair[0] < 0.0)) {
            let zero = |all: &Vec<[f64; 2]>| all.iter().map(|pair| pair[0].max(0.0)).collect();
            let [here, there]: [Vec<f64>; 2] = [zero(&ours[step]), zero(&theirs[step])];
            assert_eq!(here, there, "{:?}", case.schedule);
            ours.truncate(step);
            theirs.truncate(step);
            negative += 1;
        }
        assert_eq!(
            bits(&ours),
            bits(&theirs),
            "{:?}: {ours:?} here, {theirs:?} in Python",
            case.schedule
        );
    }
    assert!((1..20).contains(&negative), "{negative} of 400 cases have negative learning rates");
}

#[test]
fn a_plateau_is_found_where_pytorch_finds_it() {
    let Some(oracle) = Oracle::find("schedules.py") else { return };
    let mut rng = Rng::new(18);
    let mut case = |_| {
        let options = ReduceLrOnPlateau {
            mode: if rng.one_in(2) { MetricGoal::Max } else { MetricGoal::Min },
            threshold_mode: if rng.one_in(2) { Threshold::Abs } else { Threshold::Rel },
            factor: *rng.pick(&[0.1, 0.5, 0.0]),
            patience: rng.below(4) as u64,
            threshold: *rng.pick(&[1e-4, 0.05, 0.0]),
            cooldown: rng.below(3) as u64,
            min_lr: *rng.pick(&[0.0, 1e-3]),
            eps: *rng.pick(&[1e-8, 1e-2]),
        };
        let metrics: Vec<_> = (0..40).map(|_| rng.below(60) as f64 / 50.0 - 0.2).collect();
        (options, metrics, rng.one_in(2))
    };
    let cases: Vec<_> = (0..100).map(&mut case).collect();
    let input = cases.iter().map(|(options, metrics, adam)| {
        json!({"options": options, "metrics": metrics, "lrs": [0.1, 1.0], "adam": adam})
    });
    let output = oracle.run(&[], &json!(input.collect::<Vec<_>>()).to_string());
    let mut reduced = 0;
    for ((options, metrics, adam), line) in cases.into_iter().zip(output.lines()) {
        let theirs: Vec<Vec<[f64; 2]>> = serde_json::from_str(line).unwrap();
        let mut opt = optimizer(adam, &[0.1, 1.0]);
        let mut scheduler = options.build(&opt).unwrap();
        let mut ours = vec![rates(&opt)];
        for metric in metrics {
            scheduler.step(&mut opt, metric).unwrap();
            ours.push(rates(&opt));
        }
        reduced += usize::from(ours[40] != ours[0]);
        assert_eq!(bits(&ours), bits(&theirs), "{options:?}");
    }
    assert!(reduced > 50, "only {reduced} of 100 cases reduced a learning rate");
}
