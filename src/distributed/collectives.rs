//! The collectives of a group.

use std::time::Duration;

use tch::{Device, Kind, Tensor, no_grad};

use crate::distributed::group::ProcessGroup;
use crate::error::{DistributedError, Error, Result};
use crate::ffi::distributed::{Reduction, unwritable};
use crate::ffi::{self, OutsideRegions};

/// How the numbers of the ranks are combined.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ReduceOp {
    /// The sum.
    Sum,
    /// The sum divided by the number of ranks, for floating-point tensors.
    Mean,
    /// The smallest number. A NaN of any rank gives NaN; in PyTorch it can be lost.
    Min,
    /// The largest number. A NaN of any rank gives NaN; in PyTorch it can be lost.
    Max,
}

impl ProcessGroup {
    /// Replaces the tensor of every rank by the combination of all of them. Its shape and dtype are the same on all
    /// ranks; half-precision tensors are added in their own dtype. Blocks until the ranks have answered. Corresponds to
    /// `torch.distributed.all_reduce`.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`] for a tensor that cannot be communicated or written, such as one of which elements
    /// share memory after `expand`, and for the mean of integers;
    /// [`DistributedError::Mismatch`] if the ranks call something else;
    /// [`DistributedError::Communication`] if a rank does not answer. The tensor is unchanged then.
    ///
    /// [`DistributedError::Mismatch`]: crate::distributed::DistributedError::Mismatch
    /// [`DistributedError::Communication`]: crate::distributed::DistributedError::Communication
    pub fn all_reduce(&self, tensor: &mut Tensor, op: ReduceOp) -> Result<()> {
        let _own = OutsideRegions::enter();
        const NAME: &str = "all_reduce";
        let checked = described(self, tensor).and_then(|described| {
            let kind = tensor.f_kind()?;
            if op == ReduceOp::Mean && !is_floating(kind) {
                let problem = format!("has dtype {kind:?}, but a mean needs floating point");
                return Err(unusable(problem));
            }
            refuse_unwritable(tensor)?;
            Ok((described, kind, copied(tensor)?))
        });
        let _order = self.begin();
        let call = |(described, ..): &(String, _, _)| format!("{NAME}({op:?}) of {described}");
        let (_, kind, copy) = self.compare_checked(NAME, checked, call)?;
        self.in_place(tensor, copy, |work| {
            let reduce = |tensor: &Tensor, reduction| {
                self.run(NAME, |group| group.all_reduce(tensor, reduction))
            };
            match op {
                ReduceOp::Sum => reduce(work, Reduction::Sum),
                ReduceOp::Mean => {
                    reduce(work, Reduction::Sum)?;
                    // A number of ranks that the dtype cannot hold is not rounded.
                    let sum =
                        work.f_to_kind(if kind == Kind::Double { kind } else { Kind::Float })?;
                    let size = ffi::number_new(self.size() as f64, sum.f_kind()?, Device::Cpu)?;
                    work.f_copy_(&sum.f_div(&size)?)?;
                    Ok(())
                }
                ReduceOp::Min | ReduceOp::Max => {
                    let by = if op == ReduceOp::Min { Reduction::Min } else { Reduction::Max };
                    if !is_floating(kind) {
                        return reduce(work, by);
                    }
                    // Comparisons with NaN are false, so that its place in the ring decides whether it is lost.
                    let nan = work.f_isnan()?.f_to_kind(Kind::Uint8)?;
                    reduce(&nan, Reduction::Max)?;
                    reduce(work, by)?;
                    let not = ffi::number_new(f64::NAN, kind, Device::Cpu)?;
                    *work = not.f_where_self(&nan.f_to_kind(Kind::Bool)?, work)?;
                    Ok(())
                }
            }
        })
    }

    /// Replaces the tensor of every rank by that of rank `root`. Its shape and dtype are the same on all ranks. Blocks
    /// until the ranks have answered. Corresponds to `torch.distributed.broadcast`.
    ///
    /// # Errors
    ///
    /// As for [`all_reduce`](Self::all_reduce); [`Error::InvalidArgument`] if there is no such rank.
    pub fn broadcast(&self, tensor: &mut Tensor, root: usize) -> Result<()> {
        const NAME: &str = "broadcast";
        let checked = described(self, tensor).and_then(|described| {
            if root >= self.size() {
                let problem = format!("is {root}, but there are {} ranks", self.size());
                return Err(Error::InvalidArgument { name: "root", problem });
            }
            refuse_unwritable(tensor)?;
            Ok((described, copied(tensor)?))
        });
        let _order = self.begin();
        let call = |(described, _): &(String, _)| format!("{NAME} from {root} of {described}");
        let (_, copy) = self.compare_checked(NAME, checked, call)?;
        self.in_place(tensor, copy, |work| self.run(NAME, |group| group.broadcast(work, root)))
    }

    /// Returns the tensors of all ranks, in the order of the ranks. Their shapes and dtypes are the same. Blocks until
    /// the ranks have answered. Corresponds to `torch.distributed.all_gather`.
    ///
    /// # Errors
    ///
    /// As for [`all_reduce`](Self::all_reduce).
    pub fn all_gather(&self, tensor: &Tensor) -> Result<Vec<Tensor>> {
        const NAME: &str = "all_gather";
        let checked = described(self, tensor).and_then(|described| {
            let part = copied(tensor)?.f_view([-1])?;
            let all = [ffi::numel(&part) as i64 * self.size() as i64];
            let all = Tensor::f_empty(all, (part.f_kind()?, part.device()))?;
            Ok((described, part, all))
        });
        let _order = self.begin();
        let call = |(described, ..): &(String, _, _)| format!("{NAME} of {described}");
        let (_, part, all) = self.compare_checked(NAME, checked, call)?;
        if ffi::numel(&part) > 0 {
            self.run(NAME, |group| group.all_gather(&all, &part))?;
        }
        let all = all.f_view([&[self.size() as i64], &tensor.size()[..]].concat().as_slice())?;
        Ok(all.f_unbind(0)?)
    }

    /// Returns this rank's rows of the sum of all ranks' tensors. The first dimension is divided among the ranks in
    /// order, and its size has to be a multiple of their number. The shapes and dtypes are the same on all ranks.
    /// Blocks until the ranks have answered. Corresponds to `torch.distributed.reduce_scatter_tensor`.
    ///
    /// # Errors
    ///
    /// As for [`all_reduce`](Self::all_reduce); [`Error::InvalidArgument`] if the first dimension cannot be divided.
    pub fn reduce_scatter(&self, tensor: &Tensor) -> Result<Tensor> {
        let _own = OutsideRegions::enter();
        const NAME: &str = "reduce_scatter";
        let checked = described(self, tensor).and_then(|described| {
            let rows = self.rows(tensor)?;
            let all = copied(tensor)?;
            let part = all.f_narrow(0, 0, rows)?.f_empty_like()?;
            Ok((described, part, all))
        });
        let _order = self.begin();
        let call = |(described, ..): &(String, _, _)| format!("{NAME} of {described}");
        let (_, part, all) = self.compare_checked(NAME, checked, call)?;
        if ffi::numel(&part) > 0 {
            self.run(NAME, |group| group.reduce_scatter(&part, &all))?;
        }
        Ok(part)
    }

    /// The rows of each rank's part of a tensor.
    fn rows(&self, tensor: &Tensor) -> Result<i64> {
        let (size, ranks) = (ffi::sizes(tensor)?, self.size() as i64);
        match size.first() {
            Some(rows) if rows % ranks == 0 => Ok(rows / ranks),
            _ => {
                let problem = "but its first dimension must be a multiple of the number of ranks";
                Err(unusable(format!("is {size:?}, {problem}, {ranks}")))
            }
        }
    }

    /// Returns whether any rank passes `true`, so that all ranks follow the decision of one, such as to stop or to skip
    /// a batch. Blocks until the ranks have answered. Corresponds to an `all_reduce` of a flag with `ReduceOp.MAX`.
    ///
    /// # Errors
    ///
    /// As for [`barrier`](Self::barrier).
    pub fn any(&self, decision: bool) -> Result<bool> {
        let _order = self.begin();
        self.compare_with("any", "any", decision)
    }

    /// Blocks until all ranks have called this. Corresponds to `torch.distributed.barrier`.
    ///
    /// # Errors
    ///
    /// [`DistributedError::Communication`] if a rank does not answer;
    /// [`DistributedError::Mismatch`] if a rank calls something else.
    ///
    /// [`DistributedError::Mismatch`]: crate::distributed::DistributedError::Mismatch
    /// [`DistributedError::Communication`]: crate::distributed::DistributedError::Communication
    pub fn barrier(&self) -> Result<()> {
        let _order = self.begin();
        self.compare("barrier", "barrier")
    }

    /// Blocks until all ranks have called this, for at most `timeout`. On rank 0 the error's message names all ranks
    /// that have not. It takes longer than [`barrier`](Self::barrier), and what the ranks call is not compared.
    /// Corresponds to `torch.distributed.monitored_barrier(wait_all_ranks=True)`.
    ///
    /// # Errors
    ///
    /// [`DistributedError::Communication`](crate::distributed::DistributedError::Communication) if a rank does not
    /// answer in time. The group cannot be used any more.
    pub fn monitored_barrier(&self, timeout: Duration) -> Result<()> {
        let _order = self.begin();
        self.run("monitored_barrier", |group| group.monitored_barrier(timeout))
    }

    /// Runs `work` on a copy of a tensor, and copies the result back if it succeeds.
    fn in_place(
        &self,
        tensor: &mut Tensor,
        mut copy: Tensor,
        work: impl FnOnce(&mut Tensor) -> Result<()>,
    ) -> Result<()> {
        let _own = OutsideRegions::enter();
        if ffi::numel(tensor) == 0 {
            return Ok(());
        }
        no_grad(|| {
            self.complete(|| {
                work(&mut copy)?;
                tensor.f_detach()?.f_copy_(&copy)?;
                Ok(())
            })
        })
    }
}

/// A contiguous copy to communicate. A failure leaves the tensor itself unchanged, and gloo would also write to its
/// memory without raising its version.
fn copied(tensor: &Tensor) -> Result<Tensor> {
    let _own = OutsideRegions::enter();
    no_grad(|| {
        let mut copy = Tensor::f_empty(ffi::sizes(tensor)?, (tensor.f_kind()?, tensor.device()))?;
        copy.f_copy_(tensor)?;
        Ok(copy)
    })
}

/// Returns the dtype and the shape of a tensor, or an error if a group cannot communicate it.
fn described(group: &ProcessGroup, tensor: &Tensor) -> Result<String> {
    let kind = communicable(group, tensor)?;
    if kind == Kind::Bool {
        return Err(not_communicated(kind));
    }
    let place = if tensor.device() == Device::Cpu { "" } else { " on CUDA" };
    Ok(format!("{kind:?} {:?}{place}", ffi::sizes(tensor)?))
}

/// Returns an error if a group cannot communicate a variable of a model.
pub(super) fn refuse_unusable(group: &ProcessGroup, variable: &Tensor) -> Result<()> {
    communicable(group, variable)?;
    refuse_unwritable(variable)
}

/// Returns an error for a tensor that cannot take a result, which the others would get.
fn refuse_unwritable(tensor: &Tensor) -> Result<()> {
    if unwritable(&[tensor.shallow_clone()])?.is_none() {
        return Ok(());
    }
    let problem = "has elements that share memory, as after expand, or that cannot be written; pass a copy of it";
    Err(unusable(problem.to_owned()))
}

/// Returns the dtype of a tensor, or an error if a group cannot communicate it.
fn communicable(group: &ProcessGroup, tensor: &Tensor) -> Result<Kind> {
    if !tensor.defined() {
        return Err(unusable("is undefined".to_owned()));
    }
    if ffi::sizes(tensor).is_err() {
        return Err(unusable("has no shape".to_owned()));
    }
    if tensor.is_sparse() || tensor.is_mkldnn() {
        return Err(unusable("is not dense; convert it with to_dense".to_owned()));
    }
    if let Some(problem) = group.problem_of(tensor.device()) {
        return Err(unusable(problem));
    }
    let kind = tensor.f_kind()?;
    let is_integer = matches!(kind, Kind::Uint8 | Kind::Int8 | Kind::Int | Kind::Int64);
    if is_integer || is_floating(kind) || kind == Kind::Bool {
        return Ok(kind);
    }
    Err(not_communicated(kind))
}

fn not_communicated(kind: Kind) -> Error {
    unusable(format!("has dtype {kind:?}, which groups cannot communicate; convert it first"))
}

fn is_floating(kind: Kind) -> bool {
    matches!(kind, Kind::Float | Kind::Double | Kind::Half | Kind::BFloat16)
}

fn unusable(problem: String) -> Error {
    Error::InvalidArgument { name: "tensor", problem }
}

impl ProcessGroup {
    /// Returns the texts of all ranks.
    pub(super) fn gather_texts(&self, operation: &'static str, text: &str) -> Result<Vec<String>> {
        let gather =
            |bytes: &[u8]| self.run(operation, |group| group.gather(bytes, self.size())?.finish());
        let lengths = gather(&(text.len() as u64).to_le_bytes())?;
        let lengths: Vec<_> = lengths.chunks_exact(8).map(length).collect();
        let longest = lengths.iter().copied().max().unwrap_or_default().max(1);
        let mut mine = text.as_bytes().to_vec();
        mine.resize(longest, 0);
        let all = gather(&mine)?;
        let texts = all.chunks_exact(longest).zip(lengths);
        Ok(texts.map(|(text, n)| String::from_utf8_lossy(&text[..n]).into_owned()).collect())
    }

    /// Returns an error unless all ranks make this call with the same lines, which `hash` stands for. It has the first
    /// line in which they differ, or says that a rank has failed before.
    pub(super) fn compare_lines(
        &self,
        call: &'static str,
        hash: Result<u64>,
        lines: impl FnOnce() -> String,
    ) -> Result<()> {
        let start = format!("{call} with the hash ");
        match self.compare_checked(call, hash, |hash| format!("{start}{hash:016x}")) {
            // All ranks see the same calls, and so all of them, or none, go on.
            Err(Error::Distributed(DistributedError::Mismatch { calls }))
                if calls.iter().all(|call| call.starts_with(&start)) =>
            {
                let calls = first_difference(call, &self.gather_texts(call, &lines())?);
                Err(DistributedError::Mismatch { calls }.into())
            }
            compared => compared.map(drop),
        }
    }
}

/// Returns the text of each rank in the first line in which they differ.
fn first_difference(call: &str, texts: &[String]) -> Vec<String> {
    let mut ranks: Vec<_> = texts.iter().map(|text| text.lines()).collect();
    loop {
        let lines: Vec<_> = ranks.iter_mut().map(Iterator::next).collect();
        let is_end = lines.iter().all(Option::is_none);
        if is_end || lines.windows(2).any(|pair| pair[0] != pair[1]) {
            let with = |line: Option<&str>| match line {
                Some(line) => format!("{call} with {line}"),
                None => format!("{call} without it"),
            };
            return lines.into_iter().map(with).collect();
        }
    }
}

fn length(bytes: &[u8]) -> usize {
    let length = bytes.try_into().map_or(0, u64::from_le_bytes);
    usize::try_from(length).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_difference_is_found() {
        let texts = ["a\nb\nc\n", "a\nx\n", "a\n"].map(str::to_owned);
        let calls = first_difference("a call", &texts);
        assert_eq!(calls, ["a call with b", "a call with x", "a call without it"]);
    }
}
