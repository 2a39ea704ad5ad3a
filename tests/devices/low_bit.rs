//! Low-bit moments on GPUs: the bits of the CPU, launches, scratch memory, and no synchronization.

use tch::{Device, Kind, Tensor};
use tch_amp::optim::{
    AdamW, Algorithm, AmpOptimizer, MasterWeights, MomentDtype, Muon, Optimizer, Step,
};

use crate::muon::{FOR_EACH_GROUP, FOR_EACH_WIDE};
use crate::training::GPUS;
use testkit::Case;
use testkit::bits::bits;
use testkit::simulation::{Simulation, is_model};

/// Each algorithm in each of its modes.
fn cases() -> [(Algorithm, MomentDtype); 3] {
    let adamw = AdamW::default().into();
    let muon = Muon::default().into();
    [(adamw, MomentDtype::EightBit), (adamw, MomentDtype::BFloat16), (muon, MomentDtype::BFloat16)]
}

const WEIGHTS: [(Kind, MasterWeights); 4] = [
    (Kind::Float, MasterWeights::None),
    (Kind::BFloat16, MasterWeights::Float),
    (Kind::BFloat16, MasterWeights::Remainder),
    (Kind::Half, MasterWeights::Float),
];

/// The launches of a step with everything that a scaler may pass, and of each further chunk of 2^20 elements, as the
/// guide states them: with f32 parameters, and the most with others. For Muon without the orthogonalization.
fn documented_launches((algorithm, states): (Algorithm, MomentDtype), kind: Kind) -> (i64, i64) {
    match (algorithm, states, kind) {
        (Algorithm::Muon(_), _, Kind::Float) => (39, 25),
        (Algorithm::Muon(_), _, _) => (46, 37),
        (_, MomentDtype::EightBit, Kind::Float) => (124, 89),
        (_, MomentDtype::EightBit, _) => (132, 120),
        (_, _, Kind::Float) => (85, 50),
        _ => (93, 81),
    }
}

struct Training {
    parameters: Vec<Tensor>,
    opt: Optimizer,
}

impl Training {
    fn new(
        (algorithm, states): (Algorithm, MomentDtype),
        weights: (Kind, MasterWeights),
        devices: &[Device],
        sizes: &[Vec<i64>],
    ) -> Self {
        let (kind, masters) = weights;
        let parameter = |(index, size): (usize, &Vec<i64>)| {
            let device = devices[index % devices.len()];
            numbers(size, index as f64).to_kind(kind).to_device(device).set_requires_grad(true)
        };
        let parameters: Vec<_> = sizes.iter().enumerate().map(parameter).collect();
        let builder = algorithm.master_weights(masters).moments(states);
        let opt = builder.build(&parameters, 0.01).unwrap();
        Self { parameters, opt }
    }

    fn backward(&mut self, step: usize) {
        self.opt.zero_grad().unwrap();
        for (index, parameter) in self.parameters.iter().enumerate() {
            let gradient = numbers(&parameter.size(), (7 * step + index) as f64 + 0.5) * 20.0;
            let gradient = gradient.to_kind(parameter.kind()).to_device(parameter.device());
            (parameter * gradient).sum(parameter.kind()).backward();
        }
    }

    /// Takes a step of scaled gradients that are clipped, or one that is skipped.
    fn step(&mut self, skipped: bool) {
        let device = self.parameters[0].device();
        let number = |value: f64| Tensor::from(value as f32).to_device(device);
        let (scale, clip, found_inf) = (number(3.0), number(0.5), number(f64::from(skipped)));
        let step = Step::default().with_grad_scale(&scale).with_clip_factor(&clip);
        self.opt.update(&step.with_found_inf(&found_inf)).unwrap();
    }

    /// All parameters and their states.
    fn bits(&mut self) -> Vec<Vec<u8>> {
        let state = self.opt.state_dict().unwrap().state;
        let tensors = state.values().flat_map(|tensors| tensors.values());
        let all = self.parameters.iter().chain(tensors);
        all.map(|tensor| bits(&tensor.to_device(Device::Cpu))).collect()
    }
}

/// Numbers from -1 to 1 that no generator draws, most of them small. They repeat with a prime period, so that blocks and
/// chunks, whose sizes are powers of two, differ from each other.
fn numbers(size: &[i64], seed: f64) -> Tensor {
    const PERIOD: i64 = 65_537;
    let count: i64 = size.iter().product();
    let places = Tensor::arange(count.min(PERIOD), (Kind::Double, Device::Cpu));
    let wild: Tensor = ((places + seed) * 12.9898).sin() * 43_758.545;
    let wild = wild.sin().pow_tensor_scalar(5).to_kind(Kind::Float);
    wild.repeat([count / PERIOD + 1]).narrow(0, 0, count).reshape(size)
}

#[test]
fn gpus_have_the_bits_of_the_cpu() {
    let Some(_simulation) = Simulation::find() else { return };
    // For Muon, the last one is not in a single chunk.
    let sizes = [vec![4101], vec![70, 65], vec![90, 77], vec![5000], vec![3, 350_001]];
    for case in cases() {
        let sizes = if case.0 == AdamW::default().into() { &sizes[..4] } else { &sizes };
        for weights in WEIGHTS {
            let [mut here, mut there] = [&[Device::Cpu][..], &GPUS].map(|devices| {
                let mut training = Training::new(case, weights, devices, sizes);
                for step in 0..5 {
                    training.backward(step);
                    training.step(step == 2);
                }
                training
            });
            assert!(here.bits() == there.bits(), "{case:?} {weights:?}");
        }
    }
}

#[test]
fn a_step_launches_as_documented_and_does_not_synchronize() {
    let Some(simulation) = Simulation::find() else { return };
    for case in cases() {
        let is_muon = case.0 == Muon::default().into();
        let name = if is_muon { "Muon" } else { "AdamW" };
        for weights in WEIGHTS {
            let count = |sizes: &[Vec<i64>]| {
                let mut training = Training::new(case, weights, &GPUS[..1], sizes);
                training.backward(0);
                training.step(false);
                training.backward(1);
                let ((), plain) = simulation.count(|| training.opt.step().unwrap());
                assert_eq!(plain.host_syncs, 0, "{case:?} {weights:?}");
                training.backward(2);
                let ((), scaled) = simulation.count(|| training.step(false));
                // For the three numbers created here, which a scaler already has on the device.
                assert_eq!(scaled.host_syncs, 3, "{case:?} {weights:?}");
                (plain.launches.max(scaled.launches), plain.peak_bytes.max(scaled.peak_bytes))
            };
            let [few, many] = [2, 60].map(|tensors| {
                let orthogonalized = FOR_EACH_WIDE * tensors as i64 + FOR_EACH_GROUP;
                let launches = count(&vec![vec![5, 1000]; tensors]).0;
                if is_muon { launches - orthogonalized } else { launches }
            });
            let [one, three] = [1, 3].map(|chunks| count(&vec![vec![1, 1 << 20]; chunks]));
            // The norm of so many numbers has counters, which are cleared first.
            let orthogonalized = FOR_EACH_WIDE + FOR_EACH_GROUP + i64::from(!is_model());
            let each = (three.0 - one.0) / 2 - if is_muon { orthogonalized } else { 0 };
            let mib = three.1 as f64 / f64::from(1 << 20);
            let name = format!("{name} {:?} {weights:?}", case.1);
            println!("{name}: {few}, {each} for each chunk, {mib:.1} MiB");
            assert_eq!(few, many, "{name}");
            let documented = documented_launches(case, weights.0);
            assert!(few <= documented.0 && each <= documented.1, "{few} {each}");
            assert!(weights.0 != Kind::Float || (few, each) == documented, "{few} {each}");
            assert!(mib <= 64.0, "{name}: {mib}");
        }
    }
}

#[test]
fn a_step_that_runs_out_of_memory_changes_nothing() {
    let Some(simulation) = Simulation::find() else { return };
    for case in cases() {
        for weights in [WEIGHTS[0], WEIGHTS[2]] {
            let _case = Case(format!("{case:?} {weights:?}"));
            simulation.fail_each(
                || {
                    let sizes = [vec![4101], vec![70, 65]];
                    let mut training = Training::new(case, weights, &GPUS[..1], &sizes);
                    training.backward(0);
                    training.step(false);
                    training.backward(1);
                    let before = training.bits();
                    (training, before)
                },
                |(training, _)| training.opt.step(),
                |n, (mut training, before), error| {
                    assert!(error.is_out_of_memory(), "{error}");
                    assert!(training.bits() == before, "allocation {n}");
                },
            );
        }
    }
}
