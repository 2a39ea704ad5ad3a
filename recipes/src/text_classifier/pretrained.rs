//! The weights, the vocabulary and the size of a BERT from Hugging Face.

use super::model::Config;
use super::tokens::Tokens;
use anyhow::{Context, Result, ensure};
use std::collections::HashMap;
use std::fs;
use std::path::Path;
use tch::nn::VarStore;
use tch::{Tensor, no_grad};

/// Reads the vocabulary and the size of the model in a folder.
pub fn describe(folder: &Path, length: usize) -> Result<(Tokens, Config)> {
    let tokens = Tokens::read(&folder.join("vocab.txt"))?;
    let path = folder.join("config.json");
    let text =
        fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
    let json: serde_json::Value =
        serde_json::from_str(&text).with_context(|| format!("cannot read {}", path.display()))?;
    let activation = &json["hidden_act"];
    ensure!(activation == "gelu", "{}: the activation is {activation}, not gelu", path.display());
    let config: Config = serde_json::from_value(json)
        .with_context(|| format!("{} is not of a BERT", path.display()))?;
    let (known, most) = (config.vocab_size, config.max_position_embeddings);
    ensure!(
        tokens.vocabulary.len() as i64 <= known,
        "vocab.txt has {} tokens, and the model knows {known}",
        tokens.vocabulary.len()
    );
    ensure!(length as i64 <= most, "--length {length}: the model knows at most {most} tokens");
    Ok((tokens, config))
}

/// Loads `model.safetensors` into the variables of the same names, and changes none if it does not fit. The layer that
/// classifies keeps its random weights; a pooler and heads for other tasks are not used.
pub fn load(folder: &Path, vs: &mut VarStore) -> Result<()> {
    let path = folder.join("model.safetensors");
    let found = Tensor::read_safetensors(&path)?;
    let found: HashMap<String, Tensor> =
        found.into_iter().map(|(name, tensor)| (our_name(&name), tensor)).collect();
    let variables = vs.variables();
    let ours = variables.iter().filter(|(name, _)| !name.starts_with("classifier."));
    let mut pairs = Vec::new();
    for (name, ours) in ours {
        let theirs = found.get(name);
        let theirs = theirs.with_context(|| format!("{} has no {name}", path.display()))?;
        ensure!(
            theirs.size() == ours.size(),
            "{name} in {} has the shape {:?}, and by config.json it is {:?}",
            path.display(),
            theirs.size(),
            ours.size()
        );
        pairs.push((ours, theirs));
    }
    for (ours, theirs) in pairs {
        no_grad(|| ours.shallow_clone().f_copy_(theirs))?;
    }
    Ok(())
}

/// The name of a variable without the prefix that models with a head have, and with the newer names of a layer norm.
fn our_name(theirs: &str) -> String {
    let name = theirs.strip_prefix("bert.").unwrap_or(theirs);
    name.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")
}
