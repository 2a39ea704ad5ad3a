//! Counts of exponents and histories of steps on devices: without synchronizing, in as many launches for many parameters
//! as for few, and with the CPU's results.

use serde_json::{Value, json};
use tch::nn::VarStore;
use tch::{Device, Kind, Tensor, no_grad};
use tch_amp::insight::{HealthReport, ScaleHealth, ScaleHistory, SkipCause};
use tch_amp::optim::Sgd;
use tch_amp::scaler::SpikeConfig;
use tch_amp::{Autocast, Error, GradScaler};

use crate::training::GPUS;
use testkit::rng::Rng;
use testkit::rows::{rows, steps_of};
use testkit::simulation::Simulation;

/// A model whose parameters have gradients, those of `sizes` on each of `devices` in turn.
fn model(devices: &[Device], sizes: &[i64], kinds: &[Kind]) -> (VarStore, Vec<Tensor>) {
    let vs = VarStore::new(Device::Cpu);
    let mut rng = Rng::new(3);
    let mut all = Vec::new();
    for (i, size) in sizes.iter().enumerate() {
        let (device, kind) = (devices[i % devices.len()], kinds[i % kinds.len()]);
        let number = |rng: &mut Rng| match rng.below(30) {
            0 => 0.0,
            1 => f32::INFINITY,
            2 => f32::NAN,
            _ => 2f32.powi(rng.below(270) as i32 - 148) * (1.0 + rng.eighth() as f32 / 8.0),
        };
        let numbers: Vec<_> = (0..*size).map(|_| number(&mut rng)).collect();
        let gradient = Tensor::from_slice(&numbers).to_kind(kind).to_device(device);
        let mut w = (vs.root() / (i % 3)).zeros(&i.to_string(), &[*size]);
        no_grad(|| w.set_data(&gradient.zeros_like()));
        (&w * &gradient).sum(kind).backward();
        all.push(w);
    }
    (vs, all)
}

fn sizes(count: usize) -> Vec<i64> {
    (0..count as i64).map(|i| 1 + i * 7 % 50).collect()
}

const KINDS: [Kind; 4] = [Kind::Float, Kind::Half, Kind::BFloat16, Kind::Double];

#[test]
fn devices_count_what_the_cpu_counts_and_nothing_synchronizes() {
    let Some(simulation) = Simulation::find() else { return };
    let mut reports: Vec<HealthReport> = Vec::new();
    let mixed = [GPUS[1], Device::Cpu, GPUS[0]];
    let places: [&[Device]; 5] = [&[Device::Cpu], &GPUS[..1], &GPUS[1..], &GPUS, &mixed];
    for devices in places {
        let (vs, _all) = model(devices, &sizes(60), &KINDS);
        let mut health = ScaleHealth::new(&vs);
        // A scale on the CPU, so that gradients there do not make the host wait.
        let home = if devices.contains(&Device::Cpu) { Device::Cpu } else { devices[0] };
        let scaler = GradScaler::new(home).unwrap();
        let observe = || (0..3).try_for_each(|_| health.observe(&scaler));
        let (observed, counts) = simulation.count(observe);
        observed.unwrap();
        assert_eq!(counts.host_syncs, 0, "{devices:?}");
        reports.push(health.report().unwrap());
    }
    assert_eq!(reports[0].observed, 3);
    for (report, devices) in reports.iter().zip(places) {
        assert!(*report == reports[0], "{devices:?}: {report:#?}");
    }
}

#[test]
fn many_parameters_are_counted_in_as_many_launches_as_few() {
    let Some(simulation) = Simulation::find() else { return };
    for devices in [&GPUS[..1], &GPUS] {
        let launches = [12, 240].map(|count| {
            let (vs, _all) = model(devices, &sizes(count), &KINDS[..2]);
            let mut health = ScaleHealth::new(&vs);
            let scaler = GradScaler::new(GPUS[0]).unwrap();
            health.observe(&scaler).unwrap();
            let (observed, counts) = simulation.count(|| health.observe(&scaler));
            observed.unwrap();
            println!("{count} parameters on {devices:?}: {counts:?}");
            counts.launches
        });
        assert_eq!(launches[0], launches[1], "on {devices:?}");
        assert!(launches[0] <= 100, "{launches:?}");
    }
}

/// More elements than are counted at once, in tensors that are split.
#[test]
fn large_gradients_are_counted_in_parts() {
    let Some(simulation) = Simulation::find() else { return };
    let vs = VarStore::new(GPUS[0]);
    let mut sum = 0;
    for (i, size) in [3_000_000, 5, 4_000_001, 2_000_000].into_iter().enumerate() {
        let w = (vs.root() / i).zeros("w", &[size]);
        (&w * 2f64.powi(i as i32)).sum(None).backward();
        sum += size as u64;
    }
    let mut health = ScaleHealth::new(&vs);
    let (observed, counts) = simulation.count(|| health.observe(&GradScaler::disabled()));
    observed.unwrap();
    assert!(counts.peak_bytes < 128 << 20 && counts.launches < 150, "{counts:?}");
    let report = health.report().unwrap();
    let model = &serde_json::to_value(&report).unwrap()["model"]["exponents"];
    let counts = [3_000_000, 5, 4_000_001, 2_000_000];
    assert_eq!(model["counts"], json!(counts));
    let others = ["zeros", "infinite", "nan"].map(|key| model[key].as_u64().unwrap());
    assert_eq!(others.iter().chain(&counts).sum::<u64>(), sum);
    for (i, layer) in rows::<Value>(&report, "layers").iter().enumerate() {
        let exponents = &layer["exponents"];
        assert_eq!(exponents["first"], i);
        assert_eq!(exponents["counts"].as_array().unwrap().len(), 1);
    }
}

#[test]
fn an_observation_in_a_region_is_the_same() {
    let Some(_simulation) = Simulation::find() else { return };
    let (vs, _all) = model(&GPUS[..1], &sizes(20), &KINDS);
    let scaler = GradScaler::new(GPUS[0]).unwrap();
    let reports = [None, Some(Kind::Half), Some(Kind::BFloat16)].map(|region| {
        let mut health = ScaleHealth::new(&vs);
        let kind = region.unwrap_or(Kind::Half);
        let region = Autocast::new(GPUS[0]).dtype(kind).enabled(region.is_some());
        region.run(|| health.observe(&scaler)).unwrap().unwrap();
        health.report().unwrap()
    });
    assert!(reports[0] == reports[1] && reports[0] == reports[2], "{reports:#?}");
}

#[test]
fn a_failed_allocation_leaves_the_counts_and_the_history_as_they_were() {
    let Some(simulation) = Simulation::find() else { return };
    let (vs, all) = model(&GPUS, &sizes(9), &KINDS);
    let scaler = GradScaler::new(GPUS[0]).unwrap();
    let observed = || {
        let mut health = ScaleHealth::new(&vs);
        health.observe(&scaler).unwrap();
        health
    };
    let before = observed().report().unwrap();
    let failures = simulation.fail_each(
        observed,
        |health| health.observe(&scaler),
        |n, mut health, error| {
            assert!(matches!(error, Error::Torch(_)), "allocation {n}: {error}");
            assert!(health.report().unwrap() == before, "allocation {n}");
            health.observe(&scaler).unwrap();
            assert_eq!(health.report().unwrap().observed, 2);
        },
    );
    assert!(failures > 10, "{failures} allocations were reached");

    let w = all[0].detach().set_requires_grad(true);
    let mut opt = Sgd::default().build(&[w.shallow_clone()], 0.1).unwrap();
    let mut scaler = GradScaler::new(GPUS[0]).unwrap();
    scaler.backward(&w.sum(None)).unwrap();
    let outcome = scaler.step_clip_norm(&mut opt, 1.0).unwrap();
    // The second step takes the row of the first.
    let mut history = ScaleHistory::new(1).unwrap();
    history.record(&scaler, &outcome, 0.5).unwrap();
    simulation.fail_each(
        || (),
        |()| history.record(&scaler, &outcome, 0.25),
        |n, (), error| assert!(matches!(error, Error::Torch(_)), "allocation {n}: {error}"),
    );
    let report = history.report().unwrap();
    assert_eq!((report.total, steps_of(&report)[0].learning_rate), (2, 0.25));
}

#[test]
fn a_history_is_recorded_without_synchronizing() {
    let Some(simulation) = Simulation::find() else { return };
    let gradients = [1.0, 1.2, 0.8, 1.0, 70.0, f64::INFINITY, 1.0];
    for device in GPUS {
        let w = Tensor::zeros([1], (Kind::Float, device)).set_requires_grad(true);
        let mut opt = Sgd::default().build(&[w.shallow_clone()], 1.0).unwrap();
        let mut scaler = GradScaler::new(device).unwrap();
        let mut spikes =
            SpikeConfig { window: 8, warmup: 4, ..Default::default() }.build().unwrap();
        let mut history = ScaleHistory::new(5).unwrap();
        for gradient in gradients {
            opt.zero_grad().unwrap();
            scaler.backward(&(&w * gradient).sum(Kind::Float)).unwrap();
            let outcome = scaler.step_unless_spike(&mut opt, f64::INFINITY, &mut spikes).unwrap();
            let loss = Tensor::full([1], gradient, (Kind::BFloat16, device));
            let (recorded, counts) = simulation.count(|| {
                history.set_loss(&loss)?;
                history.record(&scaler, &outcome, 0.5)
            });
            recorded.unwrap();
            assert_eq!(counts.host_syncs, 0, "on {device:?}");
            assert!(counts.launches <= 10, "on {device:?}: {counts:?}");
            scaler.update().unwrap();
        }
        let (report, counts) = simulation.count(|| history.report().unwrap());
        assert_eq!(counts.host_syncs, 1, "on {device:?}");
        let steps = steps_of(&report);
        let skipped: Vec<_> = steps.iter().map(|step| step.skipped).collect();
        let (spike, overflow) = (Some(SkipCause::Spike), Some(SkipCause::Overflow));
        assert_eq!(skipped, [None, None, spike, overflow, None]);
        assert_eq!((steps[3].scale, steps[4].scale), (65536.0, 32768.0));
        let losses: Vec<_> = steps.iter().map(|step| step.loss).collect();
        assert_eq!(losses[1..], [Some(1.0), Some(70.0), None, Some(1.0)]);
    }
}
