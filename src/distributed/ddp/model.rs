//! The parameters and buffers of a model, and their comparison over the ranks.

use tch::Tensor;
use tch::nn::VarStore;

use crate::distributed::group::ProcessGroup;
use crate::error::{DistributedError, Error, Result};
use crate::optim::parameters::{Named, Store};

const NAME: &str = "DistributedDataParallel";

/// What the ranks have to agree on.
#[derive(Debug)]
pub(super) struct Model {
    store: Store,
    /// The variables that require gradients, in the order in which they were added.
    pub(super) parameters: Vec<(String, Tensor)>,
    /// All others: the frozen ones, and then the buffers in the order of their names. They are broadcast once.
    pub(super) others: Vec<(String, Tensor)>,
    /// The buffers among these, which are broadcast before each forward pass.
    pub(super) buffers: Vec<Tensor>,
}

impl Model {
    pub(super) fn new(vs: &VarStore) -> Result<Self> {
        let mut store = Store::new(vs);
        let added = store.added()?;
        store.taken(added.len());
        let mut rest = vs.variables();
        let (mut parameters, mut others) = (Vec::new(), Vec::new());
        for Named { name, tensor, .. } in added {
            let name = name.unwrap_or_default();
            drop(rest.remove(&name));
            let list = if tensor.requires_grad() { &mut parameters } else { &mut others };
            list.push((name, tensor));
        }
        let mut rest: Vec<_> = rest.into_iter().collect();
        rest.sort_by(|(one, _), (other, _)| one.cmp(other));
        let buffers = rest.iter().map(|(_, tensor)| tensor.shallow_clone()).collect();
        others.extend(rest);
        Ok(Self { store, parameters, others, buffers })
    }

    /// Whether variables were added since.
    pub(super) fn has_more(&self) -> bool {
        self.store.has_more()
    }

    /// One line for each variable.
    fn lines(&self) -> String {
        let line = |what: &str, (name, tensor): &(String, Tensor)| {
            format!("{what} {name:?}, {:?} {:?}\n", tensor.kind(), tensor.size())
        };
        let parameters = self.parameters.iter().map(|named| line("the parameter", named));
        let others = self.others.iter().map(|named| line("the buffer or frozen parameter", named));
        parameters.chain(others).collect()
    }

    /// Returns an error unless all ranks have the same model. It names the first difference.
    pub(super) fn compare(&self, group: &ProcessGroup) -> Result<()> {
        let lines = self.lines();
        let count = self.parameters.len();
        let hash = xxhash_rust::xxh3::xxh3_64(lines.as_bytes());
        let Err(different) =
            group.compare(NAME, &format!("{NAME} of {count} parameters, {hash:x}"))
        else {
            return Ok(());
        };
        if !matches!(different, Error::Distributed(DistributedError::Mismatch { .. })) {
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
