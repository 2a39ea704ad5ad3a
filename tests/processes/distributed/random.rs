//! Random training programs, in which no rank ever parts from the others.
//!
//! `TCH_AMP_DISTRIBUTED_PROGRAMS` sets the number of programs, and `TCH_AMP_SEED` repeats one.

use std::time::{SystemTime, UNIX_EPOCH};

use tch::nn::VarStore;
use tch::{Device, Kind, Tensor};
use tch_amp::distributed::{DdpConfig, DistributedDataParallel, ProcessGroup};
use tch_amp::optim::{AdamW, Algorithm, MasterWeights, Optimizer, Sgd};
use tch_amp::scaler::GradScalerConfig;
use tch_amp::{Autocast, GradScaler};
use xxhash_rust::xxh3::xxh3_64;

use super::ranks;
use testkit::bits::bits;
use testkit::programs::number;
use testkit::rng::Rng;

const STEPS: usize = 10;

/// What all ranks do alike.
#[derive(Clone, Debug)]
struct Program {
    size: usize,
    options: DdpConfig,
    kind: Kind,
    algorithm: Algorithm,
    masters: MasterWeights,
    sharded: bool,
    autocast: bool,
    clips: bool,
}

impl Program {
    fn new(rng: &mut Rng) -> Self {
        let options = DdpConfig {
            bucket_cap_mb: *rng.pick(&[None, Some(0.0001), Some(0.001)]),
            find_unused_parameters: rng.one_in(2),
            gradient_as_bucket_view: rng.one_in(2),
            compression: *rng.pick(&[None, Some(Kind::Half), Some(Kind::BFloat16)]),
            divide_first: rng.one_in(2),
            compare_passes: !rng.one_in(4),
            ..Default::default()
        };
        let kind = *rng.pick(&[Kind::Float, Kind::Float, Kind::BFloat16]);
        let masters = [
            MasterWeights::Float,
            MasterWeights::Remainder,
            MasterWeights::StochasticRounding { seed: rng.next() },
        ];
        let masters = if kind == Kind::Float { MasterWeights::None } else { *rng.pick(&masters) };
        let algorithm = *rng
            .pick(&[AdamW::default().into(), Sgd { momentum: 0.9, ..Default::default() }.into()]);
        let size = 2 + rng.below(3);
        let mut chance = || rng.one_in(2);
        let (sharded, autocast, clips) = (chance(), chance(), chance());
        Self { size, options, kind, algorithm, masters, sharded, autocast, clips }
    }
}

struct Replica {
    vs: VarStore,
    weights: Vec<Tensor>,
}

impl Replica {
    fn new(kind: Kind, rank: usize) -> Self {
        let mut vs = VarStore::new(Device::Cpu);
        let shapes: [&[i64]; 4] = [&[9, 6], &[9], &[9], &[4, 9]];
        let weight = |(i, shape): (usize, &&[i64])| {
            let numbers: Vec<f32> = (0..shape.iter().product())
                .map(|n: i64| ((n * 29 + (i + rank) as i64 * 7) % 17 - 8) as f32 / 32.0)
                .collect();
            vs.root().var_copy(&format!("w{i}"), &Tensor::from_slice(&numbers).view(*shape))
        };
        let weights = shapes.iter().enumerate().map(weight).collect();
        vs.set_kind(kind);
        Self { vs, weights }
    }
}

impl Replica {
    fn loss(&self, program: &Program, rng: &mut Rng) -> Tensor {
        let rows = 1 + rng.below(5) as i64;
        let numbers: Vec<f32> = (0..rows * 6).map(|_| rng.eighth() as f32).collect();
        let xs = Tensor::from_slice(&numbers).view([rows, 6]).to_kind(program.kind);
        let with_extra = !program.options.find_unused_parameters || rng.one_in(2);
        let [w0, w1, w2, w3] = &self.weights[..] else { unreachable!() };
        let forward = || {
            let xs = xs.linear(w0, Some(w1));
            let xs = if with_extra { xs + w2 } else { xs };
            xs.relu().linear(w3, None::<&Tensor>)
        };
        let region = Autocast::new(Device::Cpu).dtype(Kind::BFloat16).enabled(program.autocast);
        let loss = region.run(forward).unwrap().square().mean(Kind::Float);
        match rng.below(12) {
            0 => loss * f64::INFINITY,
            1 => loss * f64::NAN,
            _ => loss,
        }
    }

    fn optimizer(&self, program: &Program, group: &ProcessGroup) -> Optimizer {
        let builder = program.algorithm.master_weights(program.masters);
        let mut opt = builder.build(&self.vs, 0.0625).unwrap();
        if program.sharded {
            opt.shard_over(group).unwrap();
        }
        opt
    }
}

fn new_scaler() -> GradScaler {
    let config = GradScalerConfig { init_scale: 4096.0, growth_interval: 2, ..Default::default() };
    config.build(Device::Cpu).unwrap()
}

/// The hash of all that must be the same on all ranks.
fn state(replica: &Replica, scaler: &GradScaler) -> i64 {
    let mut all: Vec<u8> = replica.weights.iter().flat_map(bits).collect();
    all.extend(scaler.get_scale().unwrap().to_le_bytes());
    all.extend(scaler.get_growth_tracker().unwrap().to_le_bytes());
    xxh3_64(&all) as i64
}

/// Trains, and returns the number of steps that were skipped.
fn train(program: &Program, seed: u64, group: &ProcessGroup) -> usize {
    // What the ranks do alike, and what each has for itself.
    let mut common = Rng::new(seed);
    let mut own = Rng::new(seed ^ (group.rank() as u64 + 1) << 32);
    let replica = Replica::new(program.kind, group.rank());
    let mut ddp = program.options.build(group, &replica.vs).unwrap();
    let mut opt = replica.optimizer(program, group);
    let mut scaler = new_scaler();
    let mut skipped = 0;
    for step in 0..STEPS {
        opt.zero_grad().unwrap();
        let count = 1 + common.below(3);
        for micro in 0..count {
            let mut backward = |ddp: &mut DistributedDataParallel| {
                let loss = ddp.forward(|| replica.loss(program, &mut own)).unwrap();
                ddp.backward_scaled(&mut scaler, &loss).unwrap();
            };
            if micro + 1 < count { ddp.no_sync(backward) } else { backward(&mut ddp) }
        }
        let outcome = if program.clips {
            scaler.step_clip_norm(&mut opt, 1.0).unwrap()
        } else {
            scaler.step(&mut opt).unwrap()
        };
        skipped += usize::from(outcome.is_skipped().unwrap());
        scaler.update().unwrap();
        if common.one_in(4) {
            resume(program, group, &replica, &mut opt, &mut scaler);
        }
        let states = group.all_gather(&Tensor::from(state(&replica, &scaler))).unwrap();
        let states: Vec<_> = states.iter().map(|state| state.int64_value(&[])).collect();
        let alike = states.iter().all(|state| *state == states[0]);
        assert!(alike, "TCH_AMP_SEED={seed}, step {step}: {program:?}");
    }
    skipped
}

/// Goes on with a new optimizer and scaler, whose state only rank 0 has kept.
fn resume(
    program: &Program,
    group: &ProcessGroup,
    replica: &Replica,
    opt: &mut Optimizer,
    scaler: &mut GradScaler,
) {
    let saved = opt.state_dict().unwrap();
    let kept = scaler.state_dict().unwrap();
    *opt = replica.optimizer(program, group);
    *scaler = new_scaler();
    // In a program, the ranks read the checkpoint of rank 0. Here each keeps what it got, and only rank 0 loads its
    // scaler.
    if !program.sharded {
        opt.load_state_dict(&saved).unwrap();
    }
    if group.rank() == 0 {
        scaler.load_state_dict(&kept).unwrap();
    }
    group.broadcast_scaler(scaler).unwrap();
}

#[test]
fn ranks_never_part() {
    tch::set_num_threads(1);
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_nanos() as u64;
    let programs = number("TCH_AMP_DISTRIBUTED_PROGRAMS").unwrap_or(12);
    let seeds: Vec<_> = match number("TCH_AMP_SEED") {
        Some(seed) => vec![seed],
        None => (0..programs).map(|i| now.wrapping_add(i)).collect(),
    };
    let mut skipped = 0;
    for &seed in &seeds {
        let program = Program::new(&mut Rng::new(seed));
        skipped += ranks(program.size, |group| train(&program, seed, &group))[0];
    }
    // Infinities and NaNs of any rank were seen, and not every step had one.
    let steps = seeds.len() * STEPS;
    assert!(seeds.len() == 1 || (skipped > 0 && skipped < steps), "{skipped} of {steps}");
}
