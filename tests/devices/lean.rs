//! What the loss of a language model makes a device do: the memory at its peak, launches, waits, and the bytes that
//! operators read and write.

use tch::nn::VarStore;
use tch::{Device, Kind, Reduction, Tensor};
use tch_amp::insight::Profiler;
use tch_amp::lean::{LinearCrossEntropyConfig, linear_cross_entropy};
use tch_amp::{Autocast, Result};

use testkit::simulation::{Counts, Simulation, is_model};

const GPU: Device = Device::Cuda(0);

/// The operands of a loss, as variables.
struct Head {
    vs: VarStore,
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
}

impl Head {
    fn new([rows, width, words]: [i64; 3]) -> Self {
        let vs = VarStore::new(GPU);
        let [hidden, weight] = [("hidden", rows), ("weight", words)]
            .map(|(name, count)| vs.root().randn(name, &[count, width], 0.0, 1.0));
        let targets = (Tensor::arange(rows, (Kind::Int64, GPU)) * 7919).remainder(words);
        let head = Self { vs, hidden, weight, targets };
        head.iterate(Kind::BFloat16, &Self::of_one_row).unwrap();
        head
    }

    /// Creates the gradients, and the workspace that libtorch keeps for all later products.
    fn of_one_row(&self) -> Result<Tensor> {
        Ok(self.hidden.narrow(0, 0, 1).linear(&self.weight, None::<&Tensor>).sum(Kind::Float))
    }

    fn usual(&self) -> Result<Tensor> {
        let logits = self.hidden.linear(&self.weight, None::<&Tensor>).to_kind(Kind::Float);
        Ok(logits.cross_entropy_loss(&self.targets, None::<&Tensor>, Reduction::Mean, -100, 0.0))
    }

    fn lean(&self, config: &LinearCrossEntropyConfig) -> Result<Tensor> {
        linear_cross_entropy(&self.hidden, &self.weight, None, &self.targets, config)
    }

    fn iterate(&self, kind: Kind, loss: &dyn Fn(&Self) -> Result<Tensor>) -> Result<()> {
        Autocast::new(GPU).dtype(kind).try_run(|| loss(self))?.backward();
        Ok(())
    }

    /// What a forward and a backward pass make the device do when the gradients exist already.
    fn counts(
        &self,
        simulation: &Simulation,
        kind: Kind,
        loss: &dyn Fn(&Self) -> Result<Tensor>,
    ) -> Counts {
        simulation.count(|| self.iterate(kind, loss).unwrap()).1
    }

    /// The bytes that the operators of a forward and a backward pass read and write, without those that pick a number of
    /// each row, whose tensors the report counts as a whole.
    fn bytes(&self, kind: Kind, loss: &dyn Fn(&Self) -> Result<Tensor>) -> u64 {
        let report = Profiler::new(&self.vs).warm_up(1).run(|| self.iterate(kind, loss)).unwrap();
        let report = serde_json::to_value(&report).unwrap();
        let picks = ["aten::gather", "aten::scatter_", "aten::nll_loss_forward"];
        let rows = report["operators"].as_array().unwrap().iter();
        let rows = rows.filter(|row| !picks.contains(&row["operator"].as_str().unwrap()));
        rows.flat_map(|row| [&row["bytes_read"], &row["bytes_written"]])
            .map(|bytes| bytes.as_u64().unwrap())
            .sum()
    }
}

const MIB: i64 = 1 << 20;

/// Where the logits are converted to f32, parts of them are, which take at most 64 MiB.
#[test]
fn no_f32_tensor_has_the_size_of_the_logits() {
    let Some(simulation) = Simulation::find() else { return };
    let [rows, words] = [1024, 32768];
    let (head, logits) = (Head::new([rows, 4, words]), rows * words * 2);
    for kind in [Kind::BFloat16, Kind::Half] {
        let peak = |loss: &dyn Fn(&Head) -> Result<Tensor>| {
            head.counts(&simulation, kind, loss).peak_bytes
        };
        let usual = peak(&Head::usual);
        let new = LinearCrossEntropyConfig::default;
        let smoothed = LinearCrossEntropyConfig { label_smoothing: 0.1, z_loss: 1e-4, ..new() };
        for config in [new(), LinearCrossEntropyConfig { soft_cap: Some(30.0), ..smoothed }] {
            let kept = peak(&|head| head.lean(&config));
            let in_blocks = LinearCrossEntropyConfig { max_bytes: Some(4 << 20), ..config };
            let blocks = peak(&|head| head.lean(&in_blocks));
            println!(
                "{kind:?}: {usual} bytes with operators, {kept} kept, {blocks} in {in_blocks:?}"
            );
            assert!(kept <= logits + 68 * MIB, "{kind:?}: {kept} bytes, {logits} of them logits");
            assert!(blocks <= 24 * MIB, "{kind:?}: {blocks} bytes in {in_blocks:?}");
            assert!(kept * 5 <= 2 * usual, "{kind:?}: {kept} bytes, {usual} with operators");
        }
    }
}

/// The kernels read and write fewer bytes than those of the operators. There are more of them, but each of those for the
/// rows takes a few microseconds.
#[test]
fn kernels_are_counted_and_move_fewer_bytes_than_those_of_the_operators() {
    let Some(simulation) = Simulation::find() else { return };
    let head = Head::new([512, 16, 4096]);
    for (kind, most) in [(Kind::BFloat16, 0.95), (Kind::Half, 0.65)] {
        let usual = head.counts(&simulation, kind, &Head::usual);
        let usual_bytes = head.bytes(kind, &Head::usual);
        println!("{kind:?}: {usual:?}, {usual_bytes} bytes with operators");
        for (max_bytes, blocks) in [(None, 1), (Some(1 << 20), 4)] {
            let config = LinearCrossEntropyConfig { max_bytes, ..Default::default() };
            let loss = |head: &Head| head.lean(&config);
            let (lean, bytes) = (head.counts(&simulation, kind, &loss), head.bytes(kind, &loss));
            println!("{kind:?}, {max_bytes:?}: {lean:?}, {bytes} bytes");
            assert_eq!(lean.host_syncs, 0, "{kind:?}, {max_bytes:?}");
            assert!(lean.launches <= 24 + 40 * blocks, "{kind:?}, {max_bytes:?}: {lean:?}");
            // The CPU's kernels, which compute the numbers of a simulated GPU, make copies where CUDA's cast.
            let share = bytes as f64 / usual_bytes as f64;
            assert!(is_model() || share <= most, "{kind:?}, {max_bytes:?}: {share} of the bytes");
        }
    }
}
