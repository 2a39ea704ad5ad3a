//! States that Python's schedulers have saved in the middle of a run: they are restored strictly, go on with Python's
//! rates, and are refused where an option differs.

use serde_json::{Value, json};
use tch_amp::Error;
use tch_amp::checkpoint::{Checkpoint, CheckpointError, MetricGoal, Restored, Stateful};
use tch_amp::optim::Optimizer;
use tch_amp::schedule::{
    Annealing, ChainedScheduler, ConstantLr, CosineAnnealingLr, CosineAnnealingWarmRestarts,
    ExponentialLr, InverseSqrtLr, LinearLr, LinearWithWarmup, MultiStepLr, OneCycleLr,
    PolynomialLr, ReduceLrOnPlateau, Schedule, SequentialLr, StepLr, Threshold,
};

use super::{PARTS, optimizer, part, rates, schedule};
use testkit::files::Folder;
use testkit::python::Oracle;
use testkit::rng::Rng;

const LRS: [f64; 2] = [0.1, 3e-4];
const STEPS: usize = 60;

type Rates = Vec<[f64; 2]>;

/// How a program of Python saves a scheduler and an optimizer, with the names of the parts here.
const LAYOUTS: [(&str, [&str; 2]); 3] = [
    ("trainer", ["scheduler", "optimizer"]),
    ("lightning", ["lr_schedulers.0", "optimizer_states.0"]),
    ("dict", ["sched", "opt"]),
];

/// A run of Python with its rates after each step, and what it has saved after `at` of them.
struct Run {
    case: Value,
    parts: [&'static str; 2],
    at: usize,
    rates: Vec<Rates>,
    files: Vec<Checkpoint>,
}

/// Runs the cases in Python. Each has the options of a schedule and the step at which it is saved.
fn run(oracle: &Oracle, mut cases: Vec<(Value, usize)>) -> Vec<Run> {
    let folder = Folder::new();
    let layout = |i: usize| LAYOUTS[i % LAYOUTS.len()];
    let path = |i: usize| folder.file(&format!("{i}.pt"));
    for (i, (case, at)) in cases.iter_mut().enumerate() {
        case["lrs"] = json!(LRS);
        case["adam"] = json!(i % 2 == 0);
        case["steps"] = json!(STEPS);
        case["set"] = json!({});
        let program = &case["program"];
        case["saved"] =
            json!({"at": *at, "path": path(i), "layout": layout(i).0, "program": program});
    }
    let input = json!(cases.iter().map(|(case, _)| case).collect::<Vec<_>>()).to_string();
    let output = oracle.run(&[], &input);
    assert_eq!(output.lines().count(), cases.len());
    let all = cases.into_iter().zip(output.lines()).enumerate();
    let run = |(i, ((case, at), line)): (usize, ((Value, usize), &str))| {
        let (name, parts) = layout(i);
        let mut files = vec![Checkpoint::load(path(i)).unwrap()];
        if name == "trainer" {
            files.push(Checkpoint::load(folder.file(&format!("{i}.pt.optimizer.pt"))).unwrap());
        }
        Run { case, parts, at, rates: serde_json::from_str(line).unwrap(), files }
    };
    all.map(run).collect()
}

impl Run {
    fn optimizer(&self) -> Optimizer {
        optimizer(self.case["adam"] == json!(true), &LRS)
    }

    fn restore(&self, scheduler: impl Stateful, strict: bool) -> tch_amp::Result<Restored> {
        self.files[0].restore().add(self.parts[0], scheduler).strict(strict).apply()
    }

    fn restore_optimizer(&self, opt: &mut Optimizer) {
        self.files[self.files.len() - 1].restore().add(self.parts[1], opt).apply().unwrap();
    }

    /// Goes on from the saved state, by `advance`.
    fn goes_on(&self, opt: &mut Optimizer, mut advance: impl FnMut(&mut Optimizer, usize)) {
        let bits =
            |rates: &Rates| rates.iter().map(|pair| pair.map(f64::to_bits)).collect::<Vec<_>>();
        for (step, theirs) in self.rates.iter().enumerate().skip(self.at + 1) {
            advance(opt, step);
            let ours = rates(opt);
            if theirs.iter().any(|pair| pair[0] < 0.0) {
                return; // see `schedule`: Python goes on with a negative learning rate
            }
            assert_eq!(bits(&ours), bits(theirs), "step {step} of {}", self.case);
        }
    }

    fn is_negative(&self) -> bool {
        self.rates[self.at].iter().any(|pair| pair[0] < 0.0)
    }
}

/// The names that were left out, without their part.
fn names(restored: &Restored) -> Vec<&str> {
    let name = |key: &'_ String| key.rfind('/').map_or(0, |at| at + 1);
    restored.unexpected_keys.iter().map(|key| &key[name(key)..]).collect()
}

/// What a schedule of Python saves beside what is read or compared.
const LEFT_OUT: [&str; 10] = [
    "_get_lr_called_within_step",
    "_is_initial",
    "_last_lr",
    "_step_count",
    "anneal_func",
    "default_min_lr",
    "lr_lambdas",
    "mode_worse",
    "use_beta1",
    "verbose",
];

/// One schedule of each kind, with the step at which it is saved.
fn kinds() -> Vec<(Schedule, usize)> {
    let cosine = CosineAnnealingLr { t_max: 40, eta_min: 1e-5 };
    let linear = LinearLr { start_factor: 0.25, end_factor: 0.5, total_iters: 8 };
    let restarts = CosineAnnealingWarmRestarts { t_0: 7, t_mult: 2, eta_min: 1e-5 };
    vec![
        (StepLr { step_size: 7, gamma: 0.5 }.into(), 20),
        (MultiStepLr { milestones: vec![30, 10, 10], gamma: 0.5 }.into(), 20),
        (ConstantLr { factor: 0.5, total_iters: 40 }.into(), 20),
        (LinearLr { total_iters: 40, ..linear }.into(), 20),
        (ExponentialLr { gamma: 0.9 }.into(), 20),
        (PolynomialLr { total_iters: 50, power: 1.5 }.into(), 20),
        (cosine.into(), 20),
        (restarts.into(), 20),
        (OneCycleLr { max_lr: vec![0.5, 0.25], ..OneCycleLr::new(0.5, 61) }.into(), 50),
        (InverseSqrtLr { warmup_steps: 9 }.into(), 20),
        (LinearWithWarmup { warmup_steps: 9, total_steps: 70 }.into(), 20),
        (SequentialLr::new(linear).then_at(8, cosine).then_at(30, restarts).into(), 20),
        (ChainedScheduler::new(linear).and(ExponentialLr { gamma: 0.9 }).into(), 20),
    ]
}

fn plateau() -> ReduceLrOnPlateau {
    ReduceLrOnPlateau {
        mode: MetricGoal::Min,
        factor: 0.5,
        patience: 2,
        threshold: 0.01,
        threshold_mode: Threshold::Abs,
        cooldown: 3,
        min_lr: 2e-5,
        eps: 1e-8,
    }
}

fn metric(step: usize) -> f64 {
    let metrics = [1.0, 0.9, 0.895, 0.9, 0.91, 0.9, 0.9, 0.9, 0.9, 0.9, 0.85];
    *metrics.get(step).unwrap_or(&0.9)
}

/// The options beside those that Python gives a name of its own: which of them it saves, and as what. A learning rate
/// stands for those that it does not save, but in which its rates differ.
fn name_in_python(schedule: &str, option: &str) -> Option<&'static str> {
    Some(match (schedule, option) {
        (_, "step_size") => "step_size",
        (_, "gamma") => "gamma",
        ("SequentialLr", "milestones") => "_milestones",
        (_, "milestones") => "milestones",
        (_, "factor") => "factor",
        ("LinearWithWarmup" | "InverseSqrtLr", "warmup_steps" | "total_steps") => "_last_lr",
        (_, "total_iters") => "total_iters",
        (_, "start_factor") => "start_factor",
        (_, "end_factor") => "end_factor",
        (_, "power") => "power",
        (_, "t_max") => "T_max",
        (_, "eta_min") => "eta_min",
        (_, "t_0") => "T_0",
        (_, "t_mult") => "T_mult",
        (_, "total_steps") => "total_steps",
        (_, "pct_start" | "three_phase") => "_schedule_phases",
        (_, "anneal_strategy") => "_anneal_func_type",
        (_, "cycle_momentum") => "cycle_momentum",
        (_, "max_lr" | "div_factor") => "base_lrs",
        (_, "final_div_factor") => "_last_lr",
        // They are in the groups of the optimizer.
        (_, "base_momentum" | "max_momentum") => return None,
        other => panic!("{other:?}"),
    })
}

fn other(value: &Value) -> Value {
    match value {
        Value::Bool(value) => json!(!value),
        Value::Number(number) => match number.as_u64() {
            Some(count) => json!(count + 1),
            None => json!(number.as_f64().unwrap() * 0.75),
        },
        Value::Array(items) => {
            let (last, rest) = items.split_last().unwrap();
            json!([rest, &[other(last)]].concat())
        }
        Value::String(text) => json!(match text.as_str() {
            "cos" => "linear",
            "linear" => "cos",
            "min" => "max",
            "abs" => "rel",
            other => panic!("{other}"),
        }),
        other => panic!("{other}"),
    }
}

/// Each way to change one option of a schedule or of its parts, with the part of the checkpoint that has the option and
/// its name there.
fn changed(options: &Value, part: &str) -> Vec<(String, Option<&'static str>, Value)> {
    let fields = options.as_object().unwrap().iter().filter(|(name, _)| *name != "schedule");
    let schedule = options["schedule"].as_str().unwrap();
    let with = |field: &str, value: Value| {
        let mut changed = options.clone();
        changed[field] = value;
        changed
    };
    let mut all = Vec::new();
    for (name, value) in fields {
        if name != "schedules" {
            all.push((part.to_owned(), name_in_python(schedule, name), with(name, other(value))));
            continue;
        }
        for (i, inner) in value.as_array().unwrap().iter().enumerate() {
            for (part, option, inner) in changed(inner, &format!("{part}._schedulers.{i}")) {
                let mut parts = value.clone();
                parts[i] = inner;
                all.push((part, option, with(name, parts)));
            }
        }
    }
    all
}

fn assert_is_refused(run: &Run, result: tch_amp::Result<Restored>, part: &str, option: &str) {
    let error = result.expect_err(&format!("{option} of {part} of {}", run.case));
    let text = error.to_string();
    let Error::Checkpoint(CheckpointError::OtherOption { part: of, option: named, saved, here }) =
        error
    else {
        panic!("{option}: {text}")
    };
    assert_eq!((&*of, &*named), (part, option), "{text}");
    assert_ne!(saved, here, "{text}");
    assert!(text.contains(option) && text.contains("strict(false)"), "{text}");
}

fn every_other_option_is_refused(run: &Run) {
    let options = &run.case["options"];
    for (part, option, other) in changed(options, run.parts[0]) {
        let other: Schedule = serde_json::from_value(other).unwrap();
        let mut opt = run.optimizer();
        let mut scheduler = other.build(&mut opt).unwrap();
        let lrs = scheduler.lrs().to_vec();
        let restored = run.restore(&mut scheduler, true);
        let Some(option) = option else {
            restored.unwrap();
            continue;
        };
        assert_is_refused(run, restored, &part, option);
        assert_eq!((scheduler.steps(), scheduler.lrs()), (0, &*lrs));
        // It goes on with the other option.
        run.restore(&mut scheduler, false).unwrap();
        assert_eq!(scheduler.steps(), run.at as u64);
    }
}

fn every_other_schedule_is_refused(run: &Run, kind: usize) {
    for (other, (schedule, _)) in
        kinds().into_iter().enumerate().filter(|(other, _)| *other != kind)
    {
        let mut scheduler = schedule.build(&mut run.optimizer()).unwrap();
        let result = run.restore(&mut scheduler, true);
        assert!(result.is_err(), "kind {other} takes the state of {}", run.case);
    }
    let refused = run.restore(plateau().build(&run.optimizer()).unwrap(), true);
    assert!(refused.is_err(), "a plateau takes the state of {}", run.case);
}

#[test]
fn states_of_python_go_on_with_its_rates_and_other_options_are_refused() {
    let Some(oracle) = Oracle::find("schedules.py") else { return };
    let mut rng = Rng::new(56);
    let mut cases = kinds();
    let fixed = cases.len();
    for kind in 0..40 {
        let schedule = match kind {
            kind if kind < PARTS => part(kind, &mut rng, LRS.len()),
            _ => schedule(&mut rng, LRS.len()),
        };
        cases.push((schedule, 1 + rng.below(30)));
    }
    let schedules: Vec<Schedule> = cases.iter().map(|(schedule, _)| schedule.clone()).collect();
    let case = |(schedule, at)| (json!({"options": schedule}), at);
    let mut cases: Vec<_> = cases.into_iter().map(case).collect();
    let metrics: Vec<_> = (0..40).map(metric).collect();
    for at in [1, 6, 10] {
        cases.push((json!({"options": plateau(), "metrics": metrics}), at));
    }
    let mut runs = run(&oracle, cases);
    let plateaus = runs.split_off(schedules.len());

    for (i, (run, schedule)) in runs.iter().zip(schedules).enumerate() {
        if run.is_negative() {
            continue;
        }
        let mut opt = run.optimizer();
        let mut scheduler = schedule.build(&mut opt).unwrap();
        let restored =
            run.restore(&mut scheduler, true).unwrap_or_else(|e| panic!("{}: {e}", run.case));
        assert!(names(&restored).iter().all(|name| LEFT_OUT.contains(name)), "{restored:?}");
        run.restore_optimizer(&mut opt);
        assert_eq!(scheduler.steps(), run.at as u64);
        run.goes_on(&mut opt, |opt, _| scheduler.advance(opt).unwrap());
        if i < fixed {
            every_other_option_is_refused(run);
            every_other_schedule_is_refused(run, i);
        }
    }
    assert!(runs.iter().filter(|run| run.is_negative()).count() < 10);

    for run in &plateaus {
        let mut opt = run.optimizer();
        let mut scheduler = plateau().build(&opt).unwrap();
        let restored = run.restore(&mut scheduler, true).unwrap();
        assert!(names(&restored).iter().all(|name| LEFT_OUT.contains(name)), "{restored:?}");
        run.restore_optimizer(&mut opt);
        run.goes_on(&mut opt, |opt, step| scheduler.step(opt, metric(step - 1)).unwrap());
        let options = json!(plateau());
        for (option, value) in options.as_object().unwrap() {
            let mut changed = options.clone();
            changed[option] = other(value);
            let changed: ReduceLrOnPlateau = serde_json::from_value(changed).unwrap();
            let mut scheduler = changed.build(&opt).unwrap();
            let best = scheduler.best();
            let name = if option == "min_lr" { "min_lrs" } else { option };
            let refused = run.restore(&mut scheduler, true);
            assert_is_refused(run, refused, run.parts[0], name);
            assert_eq!(scheduler.best(), best);
            run.restore(&mut scheduler, false).unwrap();
            assert_eq!(scheduler.best(), if run.at == 1 { 1.0 } else { 0.9 });
        }
    }
}

/// They saved a function in the place of its name, and before that the lengths of two phases in the place of the list.
/// Both curves have the same rates at the ends of a phase only.
#[test]
fn a_one_cycle_of_an_older_pytorch_goes_on_and_other_options_are_refused() {
    let Some(oracle) = Oracle::find("schedules.py") else { return };
    let schedule = |anneal_strategy, three_phase| OneCycleLr {
        max_lr: vec![0.5, 0.25],
        anneal_strategy,
        three_phase,
        ..OneCycleLr::new(0.5, 61)
    };
    let [cos, linear] = [Annealing::Cos, Annealing::Linear];
    let schedules: Vec<_> =
        [("1.13", cos, false), ("1.13", linear, true), ("1.6", cos, false), ("1.6", linear, false)]
            .map(|(program, anneal, three_phase)| (program, schedule(anneal, three_phase)))
            .into();
    let case = |(program, schedule): &(&str, OneCycleLr)| {
        (json!({"options": Schedule::from(schedule.clone()), "program": program}), 50)
    };
    for (run, (program, schedule)) in
        run(&oracle, schedules.iter().map(case).collect()).iter().zip(&schedules)
    {
        let mut opt = run.optimizer();
        let mut scheduler = schedule.clone().build(&mut opt).unwrap();
        let restored =
            run.restore(&mut scheduler, true).unwrap_or_else(|e| panic!("{}: {e}", run.case));
        assert!(names(&restored).contains(&"anneal_func"), "{restored:?}");
        assert!(names(&restored).iter().all(|name| LEFT_OUT.contains(name)), "{restored:?}");
        run.restore_optimizer(&mut opt);
        run.goes_on(&mut opt, |opt, _| scheduler.advance(opt).unwrap());
        for (part, option, other) in changed(&json!(Schedule::from(schedule.clone())), run.parts[0])
        {
            let other: Schedule = serde_json::from_value(other).unwrap();
            let mut scheduler = other.build(&mut run.optimizer()).unwrap();
            let restored = run.restore(&mut scheduler, true);
            let Some(option) = option else {
                restored.unwrap();
                continue;
            };
            let option = match option {
                "_anneal_func_type" => "_last_lr",
                // Three phases can begin like two.
                "_schedule_phases" if *program == "1.6" => match &restored {
                    Err(error) if error.to_string().contains("step_size_down") => "step_size_down",
                    _ => "step_size_up",
                },
                option => option,
            };
            assert_is_refused(run, restored, &part, option);
        }
    }
}

/// States that do not have what a schedule goes on from: what is said of them, and that a run goes on as it is said.
#[test]
fn the_schedules_of_other_programs_are_refused_and_the_program_goes_on_from_their_steps() {
    let Some(oracle) = Oracle::find("schedules.py") else { return };
    let step: Schedule = StepLr { step_size: 7, gamma: 0.5 }.into();
    let warmup = LinearLr { start_factor: 1e-3, end_factor: 1.0, total_iters: 9 };
    let cosine: Schedule =
        SequentialLr::new(warmup).then_at(9, CosineAnnealingLr { t_max: 61, eta_min: 0.0 }).into();
    let function = |warmup_steps: u64| {
        json!({"schedule": "CosineWithWarmup", "warmup_steps": warmup_steps,
               "total_steps": warmup_steps + 61, "num_cycles": 0.5})
    };
    let mut sequence = json!(cosine);
    sequence["schedules"][1] = function(0);
    let of_sequence = "_schedulers.1.lr_lambdas";
    let cases = [
        ("huggingface", cosine.clone(), function(9), "lr_lambdas", "last_epoch", "LambdaLR"),
        ("mmengine", step.clone(), json!(step), "_global_step", "_global_step", "mmengine"),
        ("detectron2", step.clone(), json!(step), "_last_lr", "last_epoch", "detectron2"),
        // Its second part has taken fewer steps than the sequence.
        ("huggingface", cosine, sequence, of_sequence, "last_epoch", "LambdaLR"),
    ];
    let python = |(program, _, options, ..): &(&str, Schedule, Value, &str, &str, &str)| {
        (json!({"options": options, "program": program}), 20)
    };
    let runs = run(&oracle, cases.iter().map(python).collect());
    for (run, (_, schedule, _, name, count, what)) in runs.iter().zip(cases) {
        let mut opt = run.optimizer();
        let mut scheduler = schedule.build(&mut opt).unwrap();
        let error = run.restore(&mut scheduler, true).unwrap_err();
        let text = error.to_string();
        let Error::Checkpoint(CheckpointError::Tensor { part, tensor, .. }) = error else {
            panic!("{text}")
        };
        assert_eq!(format!("{part}.{tensor}"), format!("{}.{name}", run.parts[0]), "{text}");
        let steps = format!("{}.{count}", run.parts[0]);
        assert!(text.contains(what) && text.contains(&format!("`{steps}`")), "{text}");
        assert_eq!(scheduler.steps(), 0);

        for _ in 0..run.files[0].value::<u64>(&steps).unwrap() {
            scheduler.advance(&mut opt).unwrap();
        }
        run.restore_optimizer(&mut opt);
        assert_eq!(scheduler.steps(), 20);
        for theirs in &run.rates[21..] {
            scheduler.advance(&mut opt).unwrap();
            for (ours, theirs) in rates(&opt).iter().flatten().zip(theirs.iter().flatten()) {
                assert!((ours - theirs).abs() <= 1e-9 * theirs, "{ours} {theirs} of {}", run.case);
            }
        }
        // It is not one of a plateau, either.
        let refused = run.restore(plateau().build(&run.optimizer()).unwrap(), true).unwrap_err();
        assert!(matches!(refused, Error::Checkpoint(_)), "{refused:?}");
    }
}
