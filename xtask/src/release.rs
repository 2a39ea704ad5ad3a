//! The version of a libtorch, from its files alone.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result};

type Parse = fn(&str) -> Option<String>;

/// The version that the files of a libtorch state.
pub(crate) fn of(root: &Path) -> Result<String> {
    let files: [(&str, Parse); 4] = [
        ("build-version", |text| Some(text.trim().to_owned())),
        ("version.py", python_version),
        ("include/torch/headeronly/version.h", header_version),
        ("include/torch/csrc/api/include/torch/version.h", header_version),
    ];
    let mut versions = files.iter().filter_map(|(file, parse)| {
        fs::read_to_string(root.join(file)).ok().and_then(|text| parse(&text))
    });
    versions.next().with_context(|| {
        format!(
            "LIBTORCH is set to {}, which has no build-version, version.py or version.h: set it \
             to the folder that holds libtorch's lib and include, or unset it",
            root.display()
        )
    })
}

/// The version in the text of `torch/version.py`.
fn python_version(text: &str) -> Option<String> {
    let line = text.lines().find_map(|line| line.strip_prefix("__version__ = "))?;
    Some(line.trim_matches(['\'', '"']).to_owned())
}

/// The version in the text of `version.h`.
fn header_version(text: &str) -> Option<String> {
    let number = |part: &str| {
        let define = format!("#define TORCH_VERSION_{part} ");
        let digits = text.lines().find_map(|line| line.strip_prefix(&*define))?.trim();
        digits.parse::<u32>().ok()
    };
    Some(format!("{}.{}.{}", number("MAJOR")?, number("MINOR")?, number("PATCH")?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_version_is_read_from_python_files() {
        let text = "from typing import Optional\n__version__ = '2.13.0+cu130'\ndebug = False\n";
        assert_eq!(python_version(text).as_deref(), Some("2.13.0+cu130"));
        assert_eq!(python_version("debug = False"), None);
    }

    #[test]
    fn the_version_is_read_from_headers() {
        let text = "#pragma once\n#define TORCH_VERSION_MAJOR 2\n\n#define TORCH_VERSION_MINOR 11\n\
                    #define TORCH_VERSION_PATCH 0\n#define TORCH_VERSION \\\n  \"x\"\n";
        assert_eq!(header_version(text).as_deref(), Some("2.11.0"));
        assert_eq!(header_version("#define TORCH_VERSION_MAJOR 2\n"), None);
    }

    #[test]
    fn a_folder_without_libtorch_is_refused_by_name() {
        let error = of(Path::new("/no/libtorch")).unwrap_err().to_string();
        assert!(error.contains("/no/libtorch"), "{error}");
    }
}
