//! The layers of a model whose sizes make its matrix products slow.

use tch::nn::VarStore;

use super::words::advice_for_layer;
use crate::variables::listed;

/// Names the layers of a model that tensor cores compute less efficiently, and says how to pad each of them.
///
/// Looks at the two-dimensional variables, such as the weights of linear layers, LSTMs and embeddings, which are
/// `[outputs, inputs]`. Convolutions are left out: cuDNN pads their channels itself. The shapes alone decide, on any
/// device, and nothing is measured.
///
/// # Examples
///
/// ```
/// use tch::{Device, nn};
/// use tch_amp::precision::advice_for_model;
///
/// let vs = nn::VarStore::new(Device::Cpu);
/// let _hidden = nn::linear(vs.root() / "hidden", 784, 128, Default::default());
/// let _last = nn::linear(vs.root() / "last", 128, 10, Default::default());
/// let advice = advice_for_model(&vs);
/// assert_eq!(advice.len(), 1);
/// assert!(advice[0].starts_with("last.weight: a layer from 128 to 10"));
/// assert!(advice[0].ends_with("pad it to 128 and 16"));
/// ```
pub fn advice_for_model(vs: &VarStore) -> Vec<String> {
    let advice = listed(vs).into_iter().filter_map(|(name, variable)| match variable.size()[..] {
        [outputs, inputs] => {
            advice_for_layer(inputs, outputs).map(|text| format!("{name}: {text}"))
        }
        _ => None,
    });
    advice.collect()
}
