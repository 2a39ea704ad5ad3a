//! Runs of several ranks that resume from a checkpoint of rank 0. The ranks are processes, because threads share the
//! default random number generator.

use std::path::Path;

use tch::nn::{self, ModuleT, VarStore};
use tch::{Device, Kind, Tensor};
use tch_amp::checkpoint::{Checkpoint, CheckpointError, Rng};
use tch_amp::distributed::{DistributedDataParallel, DistributedSampler, ProcessGroup};
use tch_amp::optim::{AdamW, Optimizer};
use tch_amp::scaler::GradScalerConfig;
use tch_amp::{Error, GradScaler, autocast};

use super::processes::{only_line, spawn_ranks};
use super::ranks;
use testkit::bits::hex;
use testkit::files::Folder;
use testkit::tensors::variables;

const STEPS: u64 = 6;
const SAVED: u64 = 3;
const EXAMPLES: usize = 40;

/// Everything that a run consists of.
struct Run {
    group: ProcessGroup,
    vs: VarStore,
    net: nn::SequentialT,
    ddp: DistributedDataParallel,
    opt: Optimizer,
    scaler: GradScaler,
    sampler: DistributedSampler,
}

impl Run {
    fn new(group: &ProcessGroup, seed: i64) -> Self {
        group.manual_seed(seed);
        let vs = VarStore::new(Device::Cpu);
        let root = vs.root();
        let net = nn::seq_t()
            .add(nn::linear(&root / "one", 4, 16, Default::default()))
            .add(nn::batch_norm1d(&root / "norm", 16, Default::default()))
            .add_fn_t(|xs, train| xs.relu().dropout(0.5, train))
            .add(nn::linear(&root / "two", 16, 1, Default::default()));
        let scaler = GradScalerConfig { growth_interval: 2, ..Default::default() }
            .build(Device::Cpu)
            .unwrap();
        Self {
            group: group.clone(),
            ddp: DistributedDataParallel::new(group, &vs).unwrap(),
            opt: AdamW::default().build(&vs, 0.02).unwrap(),
            sampler: DistributedSampler::new(group, EXAMPLES).unwrap(),
            vs,
            net,
            scaler,
        }
    }

    fn step(&mut self, step: u64) {
        let xs = (Tensor::arange(4 * EXAMPLES as i64, (Kind::Float, Device::Cpu)) * 0.7).cos();
        self.sampler.set_epoch(step);
        let batch = self.sampler.indices().unwrap().narrow(0, 0, 8);
        let xs = xs.view([-1, 4]).index_select(0, &batch);
        self.opt.zero_grad().unwrap();
        let forward = || {
            let out = autocast(Device::Cpu, || self.net.forward_t(&xs, true)).unwrap();
            (out.to_kind(Kind::Float) - xs.sum_dim_intlist(1, true, Kind::Float)).square()
        };
        let loss = self.ddp.forward(forward).unwrap().mean(Kind::Float);
        self.ddp.backward_scaled(&mut self.scaler, &loss).unwrap();
        drop(self.scaler.step(&mut self.opt).unwrap());
        self.scaler.update().unwrap();
    }

    /// Every rank makes the checkpoint, and rank 0 writes it.
    fn save(&mut self, path: &Path, step: u64) {
        let mut checkpoint = Checkpoint::new();
        checkpoint.add("model", &self.vs).unwrap();
        checkpoint.add("optimizer", &mut self.opt).unwrap();
        checkpoint.add("scaler", &mut self.scaler).unwrap();
        checkpoint.add_rngs("rng", &self.group, Device::Cpu).unwrap();
        checkpoint.add_value("step", &step).unwrap();
        self.group.on_rank_0(|| checkpoint.save(path)).unwrap();
    }

    fn resume(&mut self, path: &Path) -> u64 {
        let load = || Checkpoint::load(path).map(Some);
        let checkpoint = Checkpoint::from_rank_0(&self.group, load).unwrap().unwrap();
        checkpoint
            .restore()
            .add("model", &self.vs)
            .add("optimizer", &mut self.opt)
            .add("scaler", &mut self.scaler)
            .rngs("rng", &self.group, Device::Cpu)
            .apply()
            .unwrap();
        checkpoint.value("step").unwrap()
    }

    /// The bits of all states.
    fn bits(&mut self) -> String {
        let variables: String = variables(&self.vs).values().map(hex).collect();
        let rng = hex(&Rng(Device::Cpu).get_state().unwrap());
        let (scale, next) =
            (self.scaler.get_scale().unwrap(), Tensor::rand([4], (Kind::Float, Device::Cpu)));
        format!("{scale} {} {variables} {rng}", hex(&next))
    }
}

/// What a rank of these tests does, if `task` is one of theirs, and what it prints.
pub fn run(group: &ProcessGroup, task: &str) -> Option<String> {
    let (task, folder) = task.split_once(' ')?;
    tch::set_num_threads(1);
    let own = if group.rank() == 0 { "rank 0" } else { "this file does not exist" };
    let path = Path::new(folder).join(own).with_extension("safetensors");
    Some(match task {
        "whole" => {
            let mut run = Run::new(group, 7);
            for step in 0..STEPS {
                if step == SAVED {
                    run.save(&path, step);
                }
                run.step(step);
            }
            run.bits()
        }
        "resumed" => {
            let mut run = Run::new(group, 1000);
            let first = run.resume(&path);
            (first..STEPS).for_each(|step| run.step(step));
            run.bits()
        }
        _ => {
            other_ranks(group, &path);
            "done".to_owned()
        }
    })
}

fn two_ranks(task: &str) -> Vec<String> {
    spawn_ranks(task, 2).into_iter().map(only_line).collect()
}

#[test]
fn a_resumed_run_has_the_bits_of_the_whole_one_on_each_rank() {
    let folder = Folder::new();
    let task = |name: &str| format!("{name} {}", folder.0.display());
    let whole = two_ranks(&task("whole"));
    assert_eq!(two_ranks(&task("resumed")), whole);
    let words: Vec<Vec<_>> = whole.iter().map(|line| line.split(' ').collect()).collect();
    assert!(words[0][1] != words[1][1], "the ranks draw the same numbers");
    assert!(words[0][0] != "65536", "the scale has not changed");
    // Other ranks than those that saved it.
    assert_eq!(only_line(spawn_ranks(&task("others"), 1).remove(0)), "done");
}

/// Restores the random numbers of two ranks on other numbers of ranks. The process is alone: nothing else draws
/// numbers.
fn other_ranks(alone: &ProcessGroup, path: &Path) {
    let checkpoint = Checkpoint::load(path).unwrap();
    let saved = checkpoint.tensor("rng").unwrap();
    let restored = |group: &ProcessGroup| {
        let checkpoint = Checkpoint::load(path).unwrap();
        checkpoint.restore().rngs("rng", group, Device::Cpu).apply().unwrap();
        Rng(Device::Cpu).get_state().unwrap()
    };
    // These ranks are threads, which share the generator, so that they take turns.
    let of_ranks = |size: usize| {
        let states = ranks(size, |group| {
            let turn = |turn| {
                let state = (turn == group.rank()).then(|| restored(&group));
                group.barrier().unwrap();
                state
            };
            (0..size).filter_map(turn).collect::<Vec<_>>()
        });
        states.into_iter().flatten().collect::<Vec<_>>()
    };
    let two = of_ranks(2);
    assert!(two[0] == saved.get(0) && two[1] == saved.get(1) && two[0] != two[1]);
    let three = of_ranks(3);
    assert!(three[0] != three[1] && three[0] != three[2] && three[1] != three[2]);
    assert!(three.iter().all(|state| !two.contains(state)));
    assert_eq!(of_ranks(3), three, "resuming twice gives the same numbers");
    assert_eq!(restored(alone), three[0]);
    unusable_states(alone, &saved);
}

fn unusable_states(alone: &ProcessGroup, saved: &Tensor) {
    let before = Rng(Device::Cpu).get_state().unwrap();
    // A program without ranks has saved a single state.
    let mut single = Checkpoint::new();
    single.add("rng", Rng(Device::Cpu)).unwrap();
    // A view of the second row.
    Rng(Device::Cpu).set_state(&saved.get(1)).unwrap();
    assert_eq!(Rng(Device::Cpu).get_state().unwrap(), saved.get(1));
    single.restore().rngs("rng", alone, Device::Cpu).apply().unwrap();
    assert_eq!(Rng(Device::Cpu).get_state().unwrap(), before);
    let wrong = [
        Tensor::ones([2, 16], (Kind::Uint8, Device::Cpu)),
        Tensor::ones([0, 16], (Kind::Uint8, Device::Cpu)),
        Tensor::ones([1, 5056], (Kind::Float, Device::Cpu)),
        Tensor::from(1u8),
    ];
    for (i, wrong) in wrong.iter().enumerate() {
        let mut checkpoint = Checkpoint::new();
        checkpoint.add_tensor("rng", wrong).unwrap();
        let error = checkpoint.restore().rngs("rng", alone, Device::Cpu).apply().unwrap_err();
        let is_typed = matches!(error, Error::Checkpoint(CheckpointError::Tensor { .. }));
        assert!(is_typed || (i == 0 && matches!(error, Error::Torch(_))), "{i}: {error}");
        assert_eq!(Rng(Device::Cpu).get_state().unwrap(), before);
    }
}
