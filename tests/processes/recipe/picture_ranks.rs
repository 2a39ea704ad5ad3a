//! The recipe `images` on two ranks: their batch normalization.

use anyhow::ensure;
use tch::nn::VarStore;
use tch::{Device, Kind, Tensor};

use crate::recipe::pictures::{IMAGES, accuracies};
use crate::recipe::program::{self, Recipe, losses};
use recipes::{Ended, Ranks};
use testkit::files::Folder;

fn numbers(folder: &Folder) -> Vec<Vec<Option<f64>>> {
    let row = |line: Vec<String>| line.iter().map(|cell| cell.parse().ok()).collect();
    losses(folder).into_iter().skip(1).map(row).collect()
}

/// The largest difference between the numbers of two runs.
fn difference(one: &Folder, other: &Folder) -> f64 {
    let (one, other) = (numbers(one), numbers(other));
    assert_eq!((one.len(), other.len()), (40, 40));
    let pairs = one.iter().flatten().zip(other.iter().flatten());
    let differences = pairs.map(|(one, other)| {
        assert_eq!(one.is_some(), other.is_some());
        (one.unwrap_or(0.0) - other.unwrap_or(0.0)).abs()
    });
    differences.fold(0.0, f64::max)
}

#[test]
#[ignore = "a program that the next test starts"]
fn buffers_program() {
    program::run(|_| {
        let Some(ranks) = Ranks::start(Some(2))? else { return Ok(Ended::Finished) };
        let vs = VarStore::new(Device::Cpu);
        let norm = ranks.batch_norm2d(vs.root() / "norm", 3, Default::default(), false);
        let rank = ranks.rank() as f64;
        drop(norm.forward_t(&Tensor::full([2, 3, 4, 4], rank, (Kind::Float, Device::Cpu)), true));
        let mean = vs.variables()["norm.running_mean"].view([1, 3]);
        let [first, second] = [0, 1].map(|rank| ranks.gather(&mean).map(|all| all.get(rank)));
        ensure!(first? != second?, "the ranks have updated the statistics with their own rows");
        ranks.same_buffers(&vs)?;
        ensure!(mean.sum(Kind::Double).double_value(&[]) == 0.0, "not those of the first rank");
        ensure!(ranks.any(true)?, "the ranks are still together");
        Ok(Ended::Finished)
    });
}

#[test]
fn all_ranks_get_the_statistics_of_the_first_one() {
    let program =
        Recipe { test: "recipe::picture_ranks::buffers_program", prepare: |_| (), ..IMAGES };
    program.start(&Folder::new(), "").finish();
}

#[test]
fn two_ranks_with_synchronized_statistics_have_the_numbers_of_one_process() {
    let folders = [Folder::new(), Folder::new(), Folder::new()];
    let arguments = ["", "--ranks 2 --sync-batch-norm", "--ranks 2"];
    let texts: Vec<_> = folders
        .iter()
        .zip(arguments)
        .map(|(folder, arguments)| IMAGES.start(folder, arguments).finish())
        .collect();
    let synced = difference(&folders[0], &folders[1]);
    let each = difference(&folders[0], &folders[2]);
    println!("{synced:.1e} with synchronized statistics, and {each:.1e} without");
    assert!(synced < 1e-3 && each > 1e-2, "{synced} and {each}");
    for text in &texts {
        assert!(accuracies(text).iter().all(|accuracy| *accuracy > 0.9), "{text}");
    }
}
