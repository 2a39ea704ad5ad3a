//! The layers of `src/`: no module uses a module that uses it, directly or through others.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

use anyhow::{Context, Result, ensure};

use crate::workspace;

/// The modules that each module uses.
type Uses = BTreeMap<String, BTreeSet<String>>;

/// Fails if modules use one another in a circle, and names them.
pub(crate) fn check() -> Result<()> {
    let source = workspace::root().join("src");
    let lib = read(&source.join("lib.rs"))?;
    let at_root = reexported(&lib);
    let mut uses = Uses::new();
    collect(&source, None, &at_root, &mut uses)?;
    let circle = circle(&uses);
    ensure!(circle.is_empty(), "these modules of src/ use one another: {}", circle.join(", "));
    println!("{} modules, each above those that it uses", uses.len());
    Ok(())
}

/// The items at the root of the crate, and the modules that define them.
fn reexported(lib: &str) -> BTreeMap<String, String> {
    let mut found = BTreeMap::new();
    for line in lib.split(';').filter_map(|item| item.trim().strip_prefix("pub use ")) {
        let module = line.split("::").next().unwrap_or_default();
        let names = line.rsplit("::").next().unwrap_or_default();
        for name in names.trim_matches(['{', '}']).split(',') {
            found.insert(name.trim().to_owned(), module.to_owned());
        }
    }
    found
}

fn collect(
    folder: &Path,
    module: Option<&str>,
    at_root: &BTreeMap<String, String>,
    uses: &mut Uses,
) -> Result<()> {
    let entries =
        fs::read_dir(folder).with_context(|| format!("{} cannot be read", folder.display()))?;
    for entry in entries {
        let path = entry?.path();
        let stem = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        let module = module.unwrap_or(&stem);
        if path.is_dir() {
            if stem != "tests" && stem != "guide" {
                collect(&path, Some(module), at_root, uses)?;
            }
        } else if path.extension().is_some_and(|end| end == "rs")
            && stem != "lib"
            && stem != "tests"
        {
            let named = named(&read(&path)?);
            let others = named.into_iter().map(|name| at_root.get(&name).unwrap_or(&name).clone());
            let others = others.filter(|name| name != module);
            uses.entry(module.to_owned()).or_default().extend(others);
        }
    }
    Ok(())
}

fn read(path: &Path) -> Result<String> {
    fs::read_to_string(path).with_context(|| format!("{} cannot be read", path.display()))
}

/// The names after `crate::` in a file, without comments, tests, and items used only by the documentation. Lists have no
/// lists inside.
fn named(source: &str) -> BTreeSet<String> {
    let source = source.split("#[cfg(test)]\nmod tests {").next().unwrap_or_default();
    let mut code = String::new();
    let mut for_docs = false;
    for line in source.lines().filter(|line| !line.trim_start().starts_with("//")) {
        if !for_docs {
            code.push_str(line);
            code.push('\n');
        }
        for_docs = line.trim() == "#[cfg(doc)]" || (for_docs && !line.ends_with(';'));
    }
    let after = code.split("crate::").skip(1);
    let names = after.flat_map(|rest| match rest.strip_prefix('{') {
        Some(list) => {
            let list = list.split('}').next().unwrap_or_default();
            list.split(',').map(first_name).collect()
        }
        None => vec![first_name(rest)],
    });
    names.filter(|name| !name.is_empty()).collect()
}

fn first_name(text: &str) -> String {
    text.trim_start().chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect()
}

/// The modules that are part of a circle or above one.
fn circle(uses: &Uses) -> Vec<String> {
    let mut left = uses.clone();
    while let Some(module) = lowest(&left) {
        left.remove(&module);
    }
    left.into_keys().collect()
}

/// A module that uses none of the others.
fn lowest(left: &Uses) -> Option<String> {
    let uses_none =
        |others: &BTreeSet<String>| !others.iter().any(|other| left.contains_key(other));
    left.iter().find(|(_, others)| uses_none(others)).map(|(module, _)| module.clone())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_source_has_layers() {
        check().unwrap();
    }

    #[test]
    fn a_circle_is_found() {
        let source = |text: &str| named(text);
        let uses: Uses = [
            ("a", source("use crate::b::B;\n// crate::c\n#[cfg(doc)]\nuse crate::c::C;\n")),
            ("b", source("use crate::{c, d::D};\n")),
            ("c", source("fn f() { crate::b::f() }\n")),
            ("d", source("#[cfg(test)]\nmod tests {\n use crate::a;\n}\n")),
        ]
        .map(|(module, uses)| (module.to_owned(), uses))
        .into();
        assert_eq!(circle(&uses), ["a", "b", "c"]);
    }
}
