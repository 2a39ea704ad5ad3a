//! Data-parallel training in bf16: each rank trains on its own part of the data, and all ranks have the same model.
//!
//! `cargo run --release --example distributed` trains on two ranks that are threads. As processes, for instance of
//! several hosts: `torchrun --no-python --nproc-per-node=2 target/release/examples/distributed`

use std::thread;

use anyhow::{anyhow, ensure};
use tch::nn::{self, Module, VarStore};
use tch::{Device, Kind, Tensor};
use tch_amp::distributed::{DistributedDataParallel, ProcessGroup, ReduceOp, Store};
use tch_amp::optim::AdamW;
use tch_amp::{GradScaler, try_autocast};

const EPOCHS: usize = 300;
const ROWS: i64 = 256;

/// Points of the plane, and whether they are inside of a circle. Every rank makes the same ones.
fn points() -> (Tensor, Tensor) {
    let steps = Tensor::arange(ROWS, (Kind::Float, Device::Cpu));
    let [x, y] = [0.618, 0.755].map(|step| (&steps * step).frac() * 2.0 - 1.0);
    let inside = (&x * &x + &y * &y).lt(0.6).to_kind(Kind::Float);
    (Tensor::stack(&[x, y], 1), inside.view([-1, 1]))
}

/// Trains one rank, and returns the loss over all ranks at the end.
fn train(group: &ProcessGroup) -> anyhow::Result<f64> {
    let vs = VarStore::new(Device::Cpu);
    let root = vs.root();
    let net = nn::seq()
        .add(nn::linear(&root / "hidden", 2, 32, Default::default()))
        .add_fn(|xs| xs.tanh())
        .add(nn::linear(&root / "out", 32, 1, Default::default()));
    // The weights of all ranks become those of rank 0.
    let mut ddp = DistributedDataParallel::new(group, &vs)?;
    let mut opt = AdamW::default().build(&vs, 0.03)?;
    let mut scaler = GradScaler::skip_only(Device::Cpu)?;

    let (xs, ys) = points();
    let [rank, ranks] = [group.rank(), group.size()].map(|number| number as i64);
    let [xs, ys] = [xs, ys].map(|all| all.slice(0, rank, ROWS, ranks));
    let mut total = Tensor::new();
    for _ in 0..EPOCHS {
        opt.zero_grad()?;
        let out = try_autocast(Device::Cpu, || ddp.forward(|| net.forward(&xs)))?;
        let (out, none) = (out.to_kind(Kind::Float), None::<&Tensor>);
        let loss = out.binary_cross_entropy_with_logits(&ys, none, none, tch::Reduction::Mean);
        ddp.backward_scaled(&mut scaler, &loss)?;
        scaler.step(&mut opt)?;
        scaler.update()?;
        total = loss.detach();
    }
    group.all_reduce(&mut total, ReduceOp::Mean)?;
    Ok(total.double_value(&[]))
}

/// Trains two ranks, which are threads of this process.
fn threads() -> anyhow::Result<f64> {
    let store = Store::in_process()?;
    let rank = |rank| {
        let store = store.clone();
        thread::spawn(move || train(&ProcessGroup::new(&store, rank, 2)?))
    };
    let ranks = [rank(0), rank(1)];
    let losses = ranks.map(|rank| rank.join().map_err(|_| anyhow!("a rank panicked")));
    let [first, second] = losses;
    let (first, second) = (first??, second??);
    ensure!(first == second, "the ranks have the mean {first} and {second}");
    Ok(first)
}

/// Trains the ranks that the environment describes, or two threads.
pub fn main() -> anyhow::Result<()> {
    let loss = match std::env::var_os("RANK") {
        Some(_) => {
            let group = ProcessGroup::from_env()?;
            let loss = train(&group)?;
            println!("rank {} of {} has finished", group.rank(), group.size());
            loss
        }
        None => threads()?,
    };
    println!("the loss over all ranks is {loss:.3}");
    ensure!(loss < 0.3, "the model has not learned the circle");
    Ok(())
}
