//! Parts of guests that are made once and reused: kernels and programs.
//!
//! A part is a folder whose name contains its recipe. It gets that name when it is complete, so an interrupted part is
//! made again.

use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

/// A new number makes all parts anew.
const VERSION: u32 = 2;

/// The folder of a part, made by `build` if it does not exist. `recipe` describes its ingredients.
///
/// # Errors
/// If `build` fails.
pub fn part(home: &Path, name: &str, recipe: &[&str], build: impl FnOnce(&Path) -> Result<()>) -> Result<PathBuf> {
    let mut hasher = DefaultHasher::new();
    (VERSION, recipe).hash(&mut hasher);
    let folder = home.join(format!("{name}-{:016x}", hasher.finish()));
    if folder.is_dir() {
        return Ok(folder);
    }
    let unfinished = home.join(format!("{name}.unfinished"));
    if unfinished.exists() {
        fs::remove_dir_all(&unfinished).with_context(|| format!("removing {}", unfinished.display()))?;
    }
    fs::create_dir_all(&unfinished).with_context(|| format!("making {}", unfinished.display()))?;
    build(&unfinished)?;
    fs::rename(&unfinished, &folder).with_context(|| format!("naming {}", folder.display()))?;
    remove_others(home, name, &folder)?;
    Ok(folder)
}

/// Removes parts for the same purpose with other recipes.
fn remove_others(home: &Path, name: &str, kept: &Path) -> Result<()> {
    for entry in fs::read_dir(home).context("listing parts")? {
        let path = entry.context("listing parts")?.path();
        let file = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let hash = file.strip_prefix(name).and_then(|rest| rest.strip_prefix('-'));
        let is_part = hash.is_some_and(|hash| hash.len() == 16 && hash.bytes().all(|byte| byte.is_ascii_hexdigit()));
        if is_part && path != kept {
            fs::remove_dir_all(&path).with_context(|| format!("removing {}", path.display()))?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_is_made_once_for_a_recipe_and_never_half() {
        let home = tempfile::tempdir().unwrap();
        let make = |recipe: &[&str], content: &'static str| {
            part(home.path(), "p", recipe, |folder| Ok(fs::write(folder.join("f"), content)?)).unwrap()
        };
        let broken = part(home.path(), "p", &["a"], |folder| {
            fs::write(folder.join("half"), "")?;
            anyhow::bail!("interrupted")
        });
        assert!(broken.is_err());
        let first = make(&["a"], "one");
        assert!(!first.join("half").exists());
        assert_eq!(make(&["a"], "two"), first);
        assert_eq!(fs::read_to_string(first.join("f")).unwrap(), "one");
        fs::create_dir(home.path().join("p-other")).unwrap();
        let second = make(&["b"], "three");
        assert!(second != first && second.exists() && !first.exists());
        assert!(home.path().join("p-other").exists());
    }
}
