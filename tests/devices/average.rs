//! Averages of weights on a device that answers late.

use tch::nn::VarStore;
use tch::{Device, Kind, Tensor};
use tch_amp::GradScaler;
use tch_amp::average::{AveragedWeights, Averaging, Ema, Swa};
use tch_amp::optim::Sgd;

use testkit::simulation::Simulation;
use testkit::to_f64;

const SKIPPED: [usize; 3] = [0, 3, 4];

/// Trains for eight steps, of which some are skipped, and returns the average of the weight.
fn train(averaging: Averaging, kind: Kind, device: Device) -> (Vec<f64>, u64) {
    let mut vs = VarStore::new(device);
    let w = vs.root().ones("w", &[3]);
    vs.set_kind(kind);
    let mut opt = Sgd::default().build(&vs, 0.25).unwrap();
    let mut scaler = GradScaler::new(device).unwrap();
    let mut average = averaging.build(&vs).unwrap();
    for i in 0..8 {
        iterate(&w, &mut opt, &mut scaler, &mut average, SKIPPED.contains(&i));
    }
    (to_f64(&average.average("w").unwrap()), average.updates().unwrap())
}

fn iterate(
    w: &Tensor,
    opt: &mut tch_amp::optim::Optimizer,
    scaler: &mut GradScaler,
    average: &mut AveragedWeights,
    skipped: bool,
) {
    opt.zero_grad().unwrap();
    let factor = if skipped { f64::INFINITY } else { 1.0 };
    scaler.backward(&(w * w * factor).sum(Kind::Float)).unwrap();
    let outcome = scaler.step(opt).unwrap();
    scaler.update().unwrap();
    average.update(&outcome).unwrap();
}

#[test]
fn averages_on_a_device_are_those_of_the_cpu() {
    let Some(_simulation) = Simulation::find() else { return };
    let options: [Averaging; 5] = [
        Ema { decay: 0.75, ..Ema::default() }.into(),
        Ema { decay: 0.9, warmup: true, ..Ema::default() }.into(),
        Ema { decay: 0.9, debias: true, ..Ema::default() }.into(),
        Ema { decay: 0.9, warmup: true, debias: true, ..Ema::default() }.into(),
        Swa::default().into(),
    ];
    for averaging in options {
        for kind in [Kind::Float, Kind::BFloat16, Kind::Half, Kind::Double] {
            let (device, on_device) = train(averaging, kind, Device::Cuda(0));
            let (cpu, on_cpu) = train(averaging, kind, Device::Cpu);
            // A gradient of 2 times the first scale of 65536 is more than fp16 has.
            assert_eq!((on_device, on_cpu), if kind == Kind::Half { (4, 4) } else { (5, 5) });
            // The device rounds two products, and the CPU one.
            let tolerance = if kind == Kind::Double { 1e-14 } else { 5e-7 };
            for (device, cpu) in device.iter().zip(&cpu) {
                let near = (device - cpu).abs() <= tolerance * cpu.abs();
                assert!(near, "{averaging:?}, {kind:?}: {device} and {cpu}");
            }
        }
    }
}

#[test]
fn averaging_neither_synchronizes_nor_launches_for_each_weight() {
    let Some(simulation) = Simulation::find() else { return };
    let device = Device::Cuda(0);
    let launches = |count: i64| {
        let vs = VarStore::new(device);
        let weights: Vec<_> = (0..count).map(|i| vs.root().ones(&format!("w{i}"), &[8])).collect();
        let mut opt = Sgd::default().build(&vs, 0.1).unwrap();
        let mut scaler = GradScaler::new(device).unwrap();
        let mut average =
            Ema { decay: 0.9, warmup: true, debias: true, ..Ema::default() }.build(&vs).unwrap();
        let mut outcome = None;
        for _ in 0..2 {
            opt.zero_grad().unwrap();
            let loss: Tensor = weights.iter().map(|w| w.sum(Kind::Float)).sum();
            scaler.backward(&loss).unwrap();
            outcome = Some(scaler.step(&mut opt).unwrap());
            scaler.update().unwrap();
        }
        let outcome = outcome.unwrap();
        let (_, counts) = simulation.count(|| average.update(&outcome).unwrap());
        assert_eq!(counts.host_syncs, 0);
        counts.launches
    };
    assert_eq!(launches(4), launches(40));
}

#[test]
fn swapping_copies_no_weight() {
    let Some(simulation) = Simulation::find() else { return };
    let vs = VarStore::new(Device::Cuda(0));
    let w = vs.root().ones("w", &[1 << 16]);
    let mut average = Ema { decay: 0.5, ..Ema::default() }.build(&vs).unwrap();
    average.advance().unwrap();
    let (_, counts) = simulation.count(|| {
        let _swapped = average.swap_in().unwrap();
        assert!(w.requires_grad());
    });
    assert_eq!((counts.host_syncs, counts.launches, counts.allocations), (0, 0, 0));
}
