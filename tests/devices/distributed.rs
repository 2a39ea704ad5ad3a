//! Ranks with a GPU each.

use std::process::Stdio;

use tch::nn::{self, VarStore};
use tch::{Device, Kind, Tensor};
use tch_amp::checkpoint::{Checkpoint, CheckpointFolder, Format};
use tch_amp::distributed::{
    DdpConfig, DistributedDataParallel, ProcessGroup, ReduceOp, Store, data_parallel,
};
use tch_amp::optim::{AdamW, Optimizer};
use tch_amp::scaler::GradScalerConfig;
use tch_amp::{Autocast, GradScaler};

use testkit::bits::hex;
use testkit::files::Folder;
use testkit::programs::this_test;
use testkit::simulation::{Counts, Simulation};

/// Runs two threads that form a group, each with a device.
pub fn ranks<T: Send>(
    devices: [Device; 2],
    rank: impl Fn(ProcessGroup, Device) -> T + Sync,
) -> [T; 2] {
    let both = testkit::ranks::ranks(2, |group| {
        let device = devices[group.rank()];
        rank(group, device)
    });
    both.try_into().ok().expect("there are two ranks")
}

const GPUS: [Device; 2] = [Device::Cuda(0), Device::Cuda(1)];
const CPUS: [Device; 2] = [Device::Cpu; 2];

#[test]
fn collectives_on_gpus_give_the_numbers_of_the_cpu() {
    let Some(_simulation) = Simulation::find() else { return };
    for kind in [Kind::Float, Kind::Double, Kind::Half, Kind::BFloat16, Kind::Int64] {
        let run = |devices| {
            ranks(devices, |group, device| {
                let rank = group.rank() as i64;
                let of_rank = || {
                    let numbers = Tensor::arange(6, (Kind::Int64, Device::Cpu)) * (3 * rank + 1);
                    numbers.to_kind(kind).to_device(device).view([2, 3])
                };
                let mut results = Vec::new();
                for op in [ReduceOp::Sum, ReduceOp::Mean, ReduceOp::Min, ReduceOp::Max] {
                    if op == ReduceOp::Mean && kind == Kind::Int64 {
                        continue;
                    }
                    let mut tensor = of_rank();
                    group.all_reduce(&mut tensor, op).unwrap();
                    results.push(tensor);
                }
                let mut tensor = of_rank();
                group.broadcast(&mut tensor, 1).unwrap();
                results.push(tensor);
                results.extend(group.all_gather(&of_rank()).unwrap());
                results.push(group.reduce_scatter(&of_rank()).unwrap());
                assert!(results.iter().all(|result| result.device() == device));
                results.iter().map(|result| result.to_device(Device::Cpu)).collect::<Vec<_>>()
            })
        };
        assert_eq!(run(GPUS), run(CPUS), "{kind:?}");
    }
}

#[test]
fn tensors_of_different_devices_are_not_communicated() {
    let Some(_simulation) = Simulation::find() else { return };
    ranks([Device::Cuda(0), Device::Cpu], |group, device| {
        let error = group.all_gather(&Tensor::ones([2], (Kind::Float, device))).unwrap_err();
        assert!(
            error.to_string().contains("rank 0 calls all_gather of Float [2] on CUDA"),
            "{error}"
        );
    });
}

struct Training {
    vs: VarStore,
    ddp: DistributedDataParallel,
    opt: Optimizer,
    scaler: GradScaler,
    xs: Tensor,
}

impl Training {
    fn new(group: &ProcessGroup, device: Device, options: DdpConfig, sharded: bool) -> Self {
        let vs = VarStore::new(device);
        for (i, shape) in [[8, 6], [8, 8], [1, 8]].iter().enumerate() {
            // Other weights on each rank, which become those of rank 0.
            let value = 0.125 / (i + group.rank() + 1) as f64;
            drop(vs.root().var(&format!("w{i}"), shape, nn::Init::Const(value)));
        }
        let buffer = vs.root().ones_no_train("buffer", &[3]);
        drop(buffer);
        let ddp = options.build(group, &vs).unwrap();
        let mut opt = AdamW::default().build(&vs, 0.01).unwrap();
        if sharded {
            opt.shard_over(group).unwrap();
        }
        let config =
            GradScalerConfig { init_scale: 1024.0, growth_interval: 2, ..Default::default() };
        let scaler = config.build(device).unwrap();
        let numbers = Tensor::arange(24, (Kind::Float, Device::Cpu)) * (group.rank() as f64 + 0.5);
        let xs = numbers.sin().view([4, 6]).to_device(device);
        Self { vs, ddp, opt, scaler, xs }
    }

    fn backward(&mut self, factor: f64) -> tch_amp::Result<()> {
        let weights = self.opt.trainable_variables();
        let forward = || {
            let region = Autocast::new(self.xs.device()).dtype(Kind::BFloat16);
            let layer = |xs: Tensor, w: &Tensor| xs.linear(w, None::<&Tensor>).tanh();
            region.run(|| weights.iter().fold(self.xs.shallow_clone(), layer)).unwrap()
        };
        let loss = self.ddp.forward(forward)?.to_kind(Kind::Float).sum(Kind::Float);
        self.ddp.backward_scaled(&mut self.scaler, &(loss * factor))
    }

    fn step(&mut self, factor: f64) {
        self.opt.zero_grad().unwrap();
        self.backward(factor).unwrap();
        drop(self.scaler.step(&mut self.opt).unwrap());
        self.scaler.update().unwrap();
    }

    /// Takes some steps. Rank 1 overflows in one of them, and both skip it.
    fn train(&mut self, steps: usize, rank: usize) {
        for step in 0..steps {
            self.step(if step == 2 && rank == 1 { f64::INFINITY } else { 1.0 });
        }
    }

    fn weights(&self) -> Vec<Tensor> {
        let weights = self.opt.trainable_variables();
        weights.iter().map(|w| w.detach().to_device(Device::Cpu)).collect()
    }
}

/// Each rank copies what it saves in the order of its GPU's work, so that the step that follows at once does not reach
/// it, and the other rank loads it.
#[test]
fn ranks_save_their_shares_while_their_gpus_go_on() {
    let Some(_simulation) = Simulation::find() else { return };
    for sharded in [false, true] {
        let temporary = Folder::new();
        ranks(GPUS, |group, device| {
            let new = || Training::new(&group, device, DdpConfig::default(), sharded);
            let (mut training, mut folder) = (new(), CheckpointFolder::new(&temporary.0).unwrap());
            folder = folder.format(Format::Dcp).keep_last(1);
            for step in 1..=3 {
                training.step(1.0);
                let (saved, mut checkpoint) = (training.weights(), Checkpoint::sharded(&group));
                checkpoint.add("model", &training.vs).unwrap();
                checkpoint.add("optimizer", &mut training.opt).unwrap();
                checkpoint.add("scaler", &mut training.scaler).unwrap();
                let pending = folder.save_async(step, &checkpoint).unwrap();
                training.step(1.0);
                let mut restored = new();
                Checkpoint::load(pending.wait().unwrap())
                    .unwrap()
                    .restore()
                    .add("model", &restored.vs)
                    .add("optimizer", &mut restored.opt)
                    .add("scaler", &mut restored.scaler)
                    .apply()
                    .unwrap();
                assert_eq!(restored.weights(), saved);
                restored.step(1.0);
                assert_eq!(restored.weights(), training.weights(), "{sharded} {step}");
            }
        });
    }
}

#[test]
fn gpus_train_alike_and_as_the_cpu_does() {
    let Some(_simulation) = Simulation::find() else { return };
    let options = DdpConfig { bucket_cap_mb: Some(0.0002), ..Default::default() };
    for (options, sharded) in [
        (options, false),
        (DdpConfig { compression: Some(Kind::BFloat16), ..options }, false),
        (
            DdpConfig { find_unused_parameters: true, gradient_as_bucket_view: true, ..options },
            false,
        ),
        (options, true),
    ] {
        let run = |devices| {
            ranks(devices, |group, device| {
                let mut training = Training::new(&group, device, options, sharded);
                training.train(6, group.rank());
                let scale = training.scaler.get_scale().unwrap();
                let state = training.opt.state_dict().unwrap().state.len();
                assert_eq!(training.vs.device(), device);
                (training.weights(), scale, state)
            })
        };
        let (gpus, cpus) = (run(GPUS), run(CPUS));
        assert_eq!(gpus[0].0, gpus[1].0, "{options:?}");
        assert_eq!((gpus[0].1, gpus[1].1), (2048.0, 2048.0));
        assert_eq!((gpus[0].2, gpus[1].2), (cpus[0].2, cpus[1].2));
        for (gpu, cpu) in gpus[0].0.iter().zip(&cpus[0].0) {
            assert!((gpu - cpu).abs().max().double_value(&[]) < 1e-6, "{options:?}");
        }
    }
}

#[test]
fn a_pass_that_the_other_rank_does_not_run_leaves_gpus_without_gradients() {
    let Some(_simulation) = Simulation::find() else { return };
    let options =
        DdpConfig { bucket_cap_mb: Some(0.0002), broadcast_buffers: false, ..Default::default() };
    for options in [options, DdpConfig { compression: Some(Kind::BFloat16), ..options }] {
        let run = |planted: bool| {
            ranks(GPUS, |group, device| {
                let mut training = Training::new(&group, device, options, false);
                for _ in 0..3 {
                    training.step(1.0);
                    if !planted {
                        continue;
                    }
                    training.opt.zero_grad().unwrap();
                    let backward = |training: &mut Training| training.backward(1.0);
                    let mine =
                        if group.rank() == 0 { backward(&mut training) } else { group.barrier() };
                    let error = mine.unwrap_err();
                    assert!(error.to_string().contains("rank 1 calls barrier"), "{error}");
                    let weights = training.opt.trainable_variables();
                    assert!(weights.iter().all(|weight| !weight.grad().defined()), "{options:?}");
                }
                training.step(1.0);
                training.weights()
            })
        };
        assert_eq!(run(true), run(false), "{options:?}");
    }
}

/// The number of a rank that is a process, and the port of the store.
const PROCESS: &str = "TCH_AMP_TEST_GPU_RANK";

/// Trains with an overflow of rank 1, and returns the bits of the weights.
fn trained(group: &ProcessGroup, device: Device) -> String {
    let mut training = Training::new(group, device, DdpConfig::default(), true);
    training.train(5, group.rank());
    training.weights().iter().map(hex).collect()
}

#[test]
#[ignore = "a rank of the next test"]
fn process() {
    let Ok(variable) = std::env::var(PROCESS) else { return };
    let (rank, port) = variable.split_once(' ').unwrap();
    let rank: usize = rank.parse().unwrap();
    let store = Store::connect("127.0.0.1", port.parse().unwrap()).unwrap();
    let group = ProcessGroup::new(&store, rank, 2).unwrap();
    println!("weights {}", trained(&group, GPUS[rank]));
}

#[test]
fn processes_with_a_gpu_each_train_as_threads_do() {
    let Some(_simulation) = Simulation::find() else { return };
    let store = Store::serve_locally().unwrap();
    let port = store.port().unwrap();
    let children = [0, 1].map(|rank| {
        this_test("distributed::process")
            .env(PROCESS, format!("{rank} {port}"))
            .stdout(Stdio::piped())
            .spawn()
            .unwrap()
    });
    let threads = ranks(GPUS, |group, device| trained(&group, device));
    assert_eq!(threads[0], threads[1]);
    for child in children {
        let output = child.wait_with_output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success(), "{text}");
        let weights = text.split_once("weights ").unwrap().1.lines().next();
        assert_eq!(weights, Some(threads[0].as_str()));
    }
}

#[test]
fn a_batch_is_divided_among_gpus() {
    let Some(_simulation) = Simulation::find() else { return };
    let weight = Tensor::arange(12, (Kind::Float, Device::Cpu)).view([3, 4]);
    let weights = [0, 1].map(|_| weight.to_device(GPUS[0]).set_requires_grad(true));
    let xs = Tensor::arange(20, (Kind::Float, GPUS[0])).view([5, 4]);
    let forward = |parameters: &[Tensor], xs: &Tensor| {
        assert_eq!(parameters[0].device(), xs.device());
        xs.linear(&parameters[0], None::<&Tensor>)
    };
    let region = Autocast::new(GPUS[0]).dtype(Kind::BFloat16);
    let divided = region
        .run(|| data_parallel(&GPUS, &[weights[0].shallow_clone()], &xs, forward).unwrap())
        .unwrap();
    let whole = region.run(|| forward(&[weights[1].shallow_clone()], &xs)).unwrap();
    assert_eq!((divided.device(), divided.kind()), (GPUS[0], Kind::BFloat16));
    divided.sum(Kind::Float).backward();
    whole.sum(Kind::Float).backward();
    assert_eq!(divided.to_device(Device::Cpu), whole.to_device(Device::Cpu));
    let [one, other] = weights.map(|weight| weight.grad().to_device(Device::Cpu));
    // Whole numbers below 256, which bf16 holds.
    assert_eq!(one, other);
}

#[test]
fn an_iteration_does_not_synchronize_with_the_gpus() {
    let Some(simulation) = Simulation::find() else { return };
    let barrier = std::sync::Barrier::new(2);
    let counts = ranks(GPUS, |group, device| {
        let mut training = Training::new(&group, device, DdpConfig::default(), false);
        for _ in 0..3 {
            training.step(1.0);
        }
        // The counters are those of the process, and so of both ranks.
        barrier.wait();
        if group.rank() == 0 {
            let ((), counts) = simulation.count(|| {
                barrier.wait();
                training.step(1.0);
                barrier.wait();
            });
            counts
        } else {
            barrier.wait();
            training.step(1.0);
            barrier.wait();
            Counts::default()
        }
    });
    assert_eq!(counts[0].host_syncs, 0, "{counts:?}");
    // One bucket: a collective for each of the two ranks, and copies into and out of it.
    println!("launches of both ranks: {}", counts[0].launches);
    assert!(counts[0].launches <= 100, "{counts:?}");
}
