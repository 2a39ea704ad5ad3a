//! The parameters and buffers of a model, and their comparison over the ranks.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use tch::Tensor;
use tch::nn::{VarStore, Variables};

use crate::distributed::ddp::DdpOptions;
use crate::distributed::group::ProcessGroup;
use crate::error::{DistributedError, Result};
use crate::ffi;

const NAME: &str = "DistributedDataParallel";

/// What the ranks have to agree on.
#[derive(Debug)]
pub(super) struct Model {
    variables: Arc<Mutex<Variables>>,
    /// The number of trainable variables, frozen ones included.
    trainable: usize,
    /// Those that require gradients, in the order in which they were added.
    pub(super) parameters: Vec<(String, Tensor)>,
    /// All others, in the order of their names. They are broadcast once.
    pub(super) others: Vec<(String, Tensor)>,
    /// The buffers among these, which are broadcast before each forward pass.
    pub(super) buffers: Vec<Tensor>,
}

impl Model {
    pub(super) fn new(vs: &VarStore) -> Result<Self> {
        let shared = Arc::clone(&vs.variables_);
        let variables = shared.lock().unwrap_or_else(PoisonError::into_inner);
        let (names, named): (Vec<_>, Vec<_>) =
            variables.named_variables.iter().map(|(n, t)| (n.clone(), t.shallow_clone())).unzip();
        let identities = ffi::identities(&named)?;
        let mut rest: HashMap<_, _> =
            identities.into_iter().zip(names.into_iter().zip(named)).collect();
        let trainable: Vec<_> =
            variables.trainable_variables.iter().map(|var| var.tensor.shallow_clone()).collect();
        drop(variables);
        let (mut parameters, mut others, mut buffers) = (Vec::new(), Vec::new(), Vec::new());
        for identity in ffi::identities(&trainable)? {
            if let Some((name, tensor)) = rest.remove(&identity) {
                let list = if tensor.requires_grad() { &mut parameters } else { &mut others };
                list.push((name, tensor));
            }
        }
        let mut rest: Vec<_> = rest.into_values().collect();
        rest.sort_by(|(one, _), (other, _)| one.cmp(other));
        buffers.extend(rest.iter().map(|(_, tensor)| tensor.shallow_clone()));
        others.extend(rest);
        Ok(Self { variables: shared, trainable: trainable.len(), parameters, others, buffers })
    }

    /// Whether variables were added since.
    pub(super) fn has_more(&self) -> bool {
        let variables = self.variables.lock().unwrap_or_else(PoisonError::into_inner);
        variables.trainable_variables.len() > self.trainable
    }

    /// One line for each tensor. The addresses differ from rank to rank, and are left out.
    fn lines(&self) -> String {
        let line = |what: &str, (name, tensor): &(String, Tensor)| {
            format!("the {what} {name:?}, {:?} {:?}\n", tensor.kind(), tensor.size())
        };
        let parameters = self.parameters.iter().map(|named| line("parameter", named));
        parameters.chain(self.others.iter().map(|named| line("buffer", named))).collect()
    }

    /// Returns an error unless all ranks have the same model and the same options. It names the first difference.
    pub(super) fn compare(&self, group: &ProcessGroup, options: &DdpOptions) -> Result<()> {
        let lines = self.lines();
        group.compare(NAME, &format!("{NAME} with {options:?}"))?;
        let count = self.parameters.len();
        let hash = xxhash_rust::xxh3::xxh3_64(lines.as_bytes());
        let Err(different) =
            group.compare(NAME, &format!("{NAME} of {count} parameters, {hash:x}"))
        else {
            return Ok(());
        };
        if !matches!(different, crate::Error::Distributed(DistributedError::Mismatch { .. })) {
            return Err(different);
        }
        let all = group.gather_texts(NAME, &lines)?;
        Err(DistributedError::Mismatch { calls: first_difference(&all) }.into())
    }
}

/// What each rank has in the first line in which they differ.
fn first_difference(texts: &[String]) -> Vec<String> {
    let mut ranks: Vec<_> = texts.iter().map(|text| text.lines()).collect();
    loop {
        let lines: Vec<_> = ranks.iter_mut().map(Iterator::next).collect();
        let is_end = lines.iter().all(Option::is_none);
        if is_end || lines.windows(2).any(|pair| pair[0] != pair[1]) {
            let call = |line: Option<&str>| match line {
                Some(line) => format!("{NAME} of a model with {line}"),
                None => format!("{NAME} of a model without it"),
            };
            return lines.into_iter().map(call).collect();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_difference_is_found() {
        let texts = ["a\nb\nc\n", "a\nx\n", "a\n"].map(str::to_owned);
        let calls = first_difference(&texts);
        assert!(calls[0].ends_with("with b") && calls[1].ends_with("with x"), "{calls:?}");
        assert!(calls[2].ends_with("without it"), "{calls:?}");
    }
}
