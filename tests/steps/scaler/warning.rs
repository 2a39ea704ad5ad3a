//! The warning about a scaler that skips all of its first steps, which a process of its own prints.

use std::collections::BTreeMap;

use tch::{Cuda, Device, Kind, Tensor};
use tch_amp::GradScaler;
use tch_amp::graph::Captured;
use tch_amp::optim::{AmpOptimizer, Optimizer, Sgd};
use tch_amp::scaler::{GradScalerConfig, PerLossScalers};

use crate::scaler::{INF, NAN, loss, ones};
use testkit::descent::Descent;
use testkit::for_each_device;
use testkit::programs::this_test;

const TASK: &str = "TCH_AMP_TEST_WARNING";

fn fused(device: Device) -> (Tensor, Optimizer) {
    let w = ones(Kind::Float, device);
    let opt = Sgd::default().build(vec![w.shallow_clone()], 0.1).unwrap();
    (w, opt)
}

/// Lets the outcomes of a GPU arrive.
fn wait(device: Device) {
    if let Device::Cuda(index) = device {
        Cuda::synchronize(index as i64);
    }
}

/// Ends what precedes it in the output.
fn say(text: &str) {
    eprintln!("## {text}");
}

/// The loop of the README.
fn iterate(scaler: &mut GradScaler, device: Device, gradient: f64, iterations: usize) {
    let (w, mut opt) = fused(device);
    for _ in 0..iterations {
        scaler.backward_step(&mut opt, &loss(&w, &[gradient; 3])).unwrap();
        wait(device);
    }
}

fn quiet() -> GradScalerConfig {
    GradScalerConfig { warn_of_skips: false, ..Default::default() }
}

/// A case, with the number of warnings that it prints.
type Case = (&'static str, usize, fn(Device));

/// With 40 iterations, the outcomes of 20 arrive on every device.
const CASES: [Case; 15] = [
    ("infinite", 1, |device| iterate(&mut GradScaler::new(device).unwrap(), device, INF, 80)),
    ("in bf16", 1, |device| iterate(&mut GradScaler::skip_only(device).unwrap(), device, NAN, 40)),
    ("silenced", 0, |device| iterate(&mut quiet().build(device).unwrap(), device, INF, 40)),
    ("too few", 0, |device| iterate(&mut GradScaler::new(device).unwrap(), device, INF, 19)),
    ("a step before", 0, |device| {
        let mut scaler = GradScaler::new(device).unwrap();
        iterate(&mut scaler, device, 1.0, 1);
        iterate(&mut scaler, device, INF, 40);
    }),
    ("a step in between", 0, |device| {
        let mut scaler = GradScaler::new(device).unwrap();
        iterate(&mut scaler, device, INF, 19);
        iterate(&mut scaler, device, 1.0, 1);
        iterate(&mut scaler, device, INF, 40);
    }),
    // 65536 × 1e37 is infinite, and 32 × 1e37 is not.
    ("a scale that is too high at first", 0, |device| {
        iterate(&mut GradScaler::new(device).unwrap(), device, 1e37, 40);
    }),
    ("a host optimizer", 1, |device| {
        let w = ones(Kind::Float, device);
        let mut scaler = GradScaler::new(device).unwrap();
        let mut opt = Descent(vec![w.shallow_clone()]);
        for _ in 0..40 {
            scaler.backward_step(&mut opt, &loss(&w, &[INF; 3])).unwrap();
            wait(device);
        }
    }),
    ("one optimizer of two steps", 0, |device| two(device, [INF, 1.0], 40)),
    // Twice as many steps are skipped as iterations.
    ("two optimizers for 19 iterations", 0, |device| two(device, [INF, INF], 19)),
    ("two optimizers", 1, |device| two(device, [INF, INF], 40)),
    ("no step was asked for", 0, |device| {
        let (w, mut opt) = fused(device);
        let mut scaler = GradScaler::new(device).unwrap();
        for _ in 0..40 {
            opt.zero_grad().unwrap();
            scaler.backward(&loss(&w, &[INF; 3])).unwrap();
            scaler.unscale_(&mut opt).unwrap();
            scaler.update().unwrap();
            wait(device);
        }
    }),
    ("a loaded state is no step", 1, |device| {
        let mut trained = GradScaler::new(device).unwrap();
        iterate(&mut trained, device, 1.0, 3);
        let mut scaler = GradScaler::new(device).unwrap();
        scaler.load_state_dict(&trained.state_dict().unwrap()).unwrap();
        iterate(&mut scaler, device, NAN, 40);
    }),
    ("a scale that is set", 1, |device| {
        let (w, mut opt) = fused(device);
        let mut scaler = GradScaler::new(device).unwrap();
        for _ in 0..40 {
            opt.zero_grad().unwrap();
            scaler.backward(&loss(&w, &[INF; 3])).unwrap();
            scaler.step(&mut opt).unwrap();
            scaler.update_with(1024.0).unwrap();
            wait(device);
        }
    }),
    ("a scale for each loss", 1, |device| {
        let (w, mut opt) = fused(device);
        let configs = [GradScalerConfig::default(); 2];
        let mut scalers = PerLossScalers::with_configs(device, &configs).unwrap();
        for _ in 0..40 {
            opt.zero_grad().unwrap();
            scalers.backward(0, &loss(&w, &[INF; 3]), &mut opt).unwrap();
            scalers.backward(1, &loss(&w, &[1.0; 3]), &mut opt).unwrap();
            scalers.step(&mut opt).unwrap();
            scalers.update().unwrap();
            wait(device);
        }
    }),
];

/// Iterations of two optimizers with these gradients.
fn two(device: Device, gradients: [f64; 2], iterations: usize) {
    let mut pairs = [fused(device), fused(device)];
    let mut scaler = GradScaler::new(device).unwrap();
    for _ in 0..iterations {
        for ((w, opt), gradient) in pairs.iter_mut().zip(gradients) {
            opt.zero_grad().unwrap();
            scaler.backward(&loss(w, &[gradient; 3])).unwrap();
            let opt: &mut dyn AmpOptimizer = opt;
            scaler.step(opt).unwrap();
        }
        scaler.update().unwrap();
        wait(device);
    }
}

#[test]
#[ignore = "a program that the next test starts"]
fn all_cases() {
    if std::env::var_os(TASK).is_none() {
        return;
    }
    for_each_device(|device| {
        for (name, _, run) in CASES {
            run(device);
            say(&format!("{device:?}: {name}"));
        }
    });
    let (w, mut opt) = fused(Device::Cpu);
    let mut scaler = GradScaler::new(Device::Cpu).unwrap();
    let mut graph = Captured::new(Device::Cpu).unwrap();
    for _ in 0..40 {
        let skip = || scaler.backward_step(&mut opt, &loss(&w, &[INF; 3]));
        graph.replay(skip).unwrap();
    }
    say("a graph on the CPU");
    let mut scaler = GradScaler::new(Device::Cpu).unwrap();
    iterate(&mut scaler, Device::Cpu, INF, 19);
    say("after 19");
    iterate(&mut scaler, Device::Cpu, INF, 1);
    say("after 20");
}

#[test]
fn a_scaler_that_skips_its_first_twenty_iterations_warns_once() {
    let output = this_test("scaler::warning::all_cases").env(TASK, "1").output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success(), "{said}");
    // The warnings before each line of `say`, by its text.
    let (mut parts, mut warnings) = (BTreeMap::new(), Vec::new());
    for line in said.lines() {
        match line.strip_prefix("## ") {
            Some(name) => drop(parts.insert(name, std::mem::take(&mut warnings))),
            None if line.starts_with("warning: tch-amp: ") => warnings.push(line),
            None => {}
        }
    }
    for (name, count, _) in CASES {
        let found: Vec<_> =
            parts.iter().filter(|(part, _)| part.ends_with(&format!(": {name}"))).collect();
        assert!(!found.is_empty(), "{name}: {said}");
        for (part, warnings) in found {
            assert_eq!(warnings.len(), count, "{part}: {warnings:?}");
        }
    }
    assert_eq!((parts["after 19"].len(), parts["after 20"].len()), (0, 1), "{said}");
    // There it runs like any other iteration.
    assert_eq!(parts["a graph on the CPU"].len(), 1);
    // 65536 after 20 halvings, and what to do.
    let warning = parts["after 20"][0];
    for words in
        ["first 20 iterations", "the scale is 0.0625 now", "insight::Tracer", "docs/errors.md"]
    {
        assert!(warning.contains(words), "{warning}");
    }
    assert!(parts["Cpu: in bf16"][0].contains("the scale is 1 now"));
    assert!(parts["Cpu: a scale for each loss"][0].contains("the scales are 0.0625, 65536 now"));
    assert!(parts["Cpu: a scale that is set"][0].contains("the scale is 1024 now"));
}
