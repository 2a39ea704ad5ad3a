//! Runs whose output goes nowhere.

use std::fs::File;
use std::process::Stdio;

use crate::recipe::competing::GAN;
use crate::recipe::pictures::IMAGES;
use crate::recipe::program::{Recipe, assert_equal};
use crate::recipe::resumed::GPT;
use testkit::files::Folder;

/// Programs that show their progress, and then print a table before they write the report.
const RECIPES: [Recipe; 3] = [GPT, GAN, IMAGES];

#[test]
fn a_full_or_closed_stderr_ends_no_training() {
    for recipe in &RECIPES {
        let (calm, full, closed) = (Folder::new(), Folder::new(), Folder::new());
        recipe.start(&calm, "").finish();
        let disk = File::options().write(true).open("/dev/full").unwrap();
        recipe.start_with(&full, "", Stdio::from(disk)).finish();
        let mut run = recipe.start(&closed, "");
        run.close_stderr();
        run.finish();
        for folder in [&full, &closed] {
            assert_equal(folder, &calm, recipe.test);
            assert!(folder.file("out").is_file(), "{recipe:?}");
        }
    }
}

#[test]
fn a_closed_stdout_costs_no_report() {
    for recipe in &RECIPES {
        let folder = Folder::new();
        let mut run = recipe.start(&folder, "");
        run.close_stdout();
        // The test harness cannot say that the test has passed, and fails.
        let output = run.output();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!said.contains("panicked at examples"), "{said}");
        assert!(folder.file("out").is_file(), "{recipe:?}: {said}");
    }
}
