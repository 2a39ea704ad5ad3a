//! The pictures of the README: on docs.rs, where a page has no files beside it, they are in the addresses of the links.

use anyhow::Result;

use crate::{committed, paths};

const PICTURES: &str = "docs/pictures";

/// Defines the targets of the pictures in the documentation, before the README defines them as files.
pub(crate) const TARGETS: &str = "src/guide/pictures.md";

/// The width of a picture in the documentation, in pixels.
const WIDTH: u32 = 480;

/// Fails if the documentation has other pictures than the folder.
pub(crate) fn check() -> Result<()> {
    committed::check(TARGETS, &targets()?, "run `cargo xtask fmt`")
}

/// Writes the definitions.
pub(crate) fn write() -> Result<()> {
    committed::write(TARGETS, &targets()?)
}

fn targets() -> Result<String> {
    let mut text = String::new();
    for path in paths::files(PICTURES, ".svg")? {
        let svg = encoded(&sized(&paths::read(&path)?));
        text += &format!("[{} picture]: data:image/svg+xml,{svg}\n", paths::stem(&path));
    }
    Ok(text)
}

/// The picture as wide as half of a page of docs.rs: without a width it is as wide as the page.
fn sized(svg: &str) -> String {
    svg.replacen("<svg ", &format!("<svg width=\"{WIDTH}\" "), 1)
}

/// The characters that an address may have as they are, and every other byte as `%` and two digits.
fn encoded(svg: &str) -> String {
    let mut out = String::new();
    for byte in svg.trim_end().bytes() {
        if byte.is_ascii_alphanumeric() || b"-._/:;,=".contains(&byte) {
            out.push(char::from(byte));
        } else {
            out.push_str(&format!("%{byte:02X}"));
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_picture_has_a_width() {
        assert_eq!(
            sized("<svg viewBox=\"0 0 9 9\"></svg>"),
            "<svg width=\"480\" viewBox=\"0 0 9 9\"></svg>"
        );
    }

    #[test]
    fn what_an_address_may_not_have_is_encoded() {
        assert_eq!(encoded("<a x=\"1\">2¹⁵</a>\n"), "%3Ca%20x=%221%22%3E2%C2%B9%E2%81%B5%3C/a%3E");
    }
}
