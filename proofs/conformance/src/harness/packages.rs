//! Debian packages of a suite, fetched and unpacked without installing anything.
//!
//! The package lists are private to the harness, and as far as they know nothing is installed, so the answer does not depend on
//! the machine. Which server they come from is for the machine to say: it is the one its own package sources name.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};

use super::Unavailable;

/// The key that suites are signed with, where Debian keeps it.
const KEYRING: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";

/// One suite of the archive.
pub struct Suite {
    name: &'static str,
    folder: PathBuf,
}

impl Suite {
    /// Brings the lists of a suite, in a folder below `home`, up to date.
    ///
    /// # Errors
    /// [`Unavailable`] if there is no `apt-get`, no Debian source, or the server does not answer.
    pub fn open(name: &'static str, home: &Path) -> Result<Suite> {
        let suite = Suite { name, folder: home.join("apt").join(name) };
        for folder in ["lists/partial", "cache/archives/partial", "empty", "debs"] {
            fs::create_dir_all(suite.folder.join(folder)).context("making a folder for package lists")?;
        }
        fs::write(suite.folder.join("status"), "").context("writing the list of installed packages")?;
        let server = server()?;
        let signed_by = if Path::new(KEYRING).exists() { format!("signed-by={KEYRING} ") } else { String::new() };
        let line = format!("deb [{signed_by}arch=amd64 target=Packages] {server} {name} main\n");
        fs::write(suite.folder.join("sources"), line).context("writing the package source")?;
        let update = suite.command("apt-get").args(["-qq", "update"]).output();
        let update = update.map_err(|error| Unavailable(format!("apt-get cannot be run: {error}")))?;
        if !update.status.success() {
            let why = String::from_utf8_lossy(&update.stderr);
            bail!(Unavailable(format!("no package list of {name}: {}", why.trim())));
        }
        Ok(suite)
    }

    fn command(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        let mut set = |name: &str, value: &str| {
            command.arg("-o").arg(format!("{name}={value}"));
        };
        for (name, path) in [
            ("Dir::Etc::SourceList", "sources"),
            ("Dir::Etc::SourceParts", "empty"),
            ("Dir::Etc::PreferencesParts", "empty"),
            ("Dir::State::Lists", "lists"),
            ("Dir::State::status", "status"),
            ("Dir::Cache", "cache"),
        ] {
            set(name, &self.folder.join(path).to_string_lossy());
        }
        set("APT::Architecture", "amd64");
        set("Acquire::Languages", "none");
        set("Acquire::Retries", "2");
        set("Acquire::http::Timeout", "20");
        set("Acquire::https::Timeout", "20");
        if rustix::process::geteuid().is_root() {
            // The user that apt would change to need not be allowed to read this folder.
            set("APT::Sandbox::User", "root");
        }
        command.env("LC_ALL", "C").stdin(Stdio::null());
        command
    }

    fn ask(&self, words: &[&str]) -> Result<String> {
        let output = self.command("apt-cache").args(words).output();
        let output = output.map_err(|error| Unavailable(format!("apt-cache cannot be run: {error}")))?;
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    /// A field of the newest version of a package.
    ///
    /// # Errors
    /// If there is no such package or field.
    pub fn field(&self, package: &str, field: &str) -> Result<String> {
        let shown = self.ask(&["show", "--no-all-versions", package])?;
        let line = shown.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(": "));
        let line = line.with_context(|| format!("{} has no package {package} with a field {field}", self.name))?;
        Ok(line.to_owned())
    }

    /// These packages and the libraries that they depend on. Services, interpreters and scripts stay out.
    ///
    /// # Errors
    /// If the lists cannot be asked.
    pub fn with_libraries(&self, packages: &[&str]) -> Result<Vec<String>> {
        let all = ["recommends", "suggests", "conflicts", "breaks", "replaces", "enhances"];
        let without: Vec<String> = all.iter().map(|kind| format!("--no-{kind}")).collect();
        let mut words = vec!["depends", "--recurse"];
        words.extend(without.iter().map(String::as_str));
        words.extend(packages);
        let depends = self.ask(&words)?;
        let wanted: BTreeSet<&str> = depends.lines().filter(|name| is_wanted(name, packages)).collect();
        // Names that only other packages provide are in the answer, too; there is nothing to fetch for them.
        let mut words = vec!["madison"];
        words.extend(&wanted);
        let there = self.ask(&words)?;
        let there: BTreeSet<&str> = there.lines().filter_map(|line| Some(line.split_once('|')?.0.trim())).collect();
        if let Some(absent) = packages.iter().find(|package| !there.contains(*package)) {
            bail!("{} has no package {absent}", self.name);
        }
        Ok(there.into_iter().map(str::to_owned).collect())
    }

    /// Fetches packages and unpacks them into `root`.
    ///
    /// # Errors
    /// [`Unavailable`] if they cannot be fetched.
    pub fn unpack(&self, packages: &[String], root: &Path) -> Result<()> {
        let debs = self.folder.join("debs");
        fs::remove_dir_all(&debs)
            .and_then(|()| fs::create_dir_all(&debs))
            .context("emptying the folder of packages")?;
        fs::create_dir_all(root).with_context(|| format!("making {}", root.display()))?;
        let download = self.command("apt-get").args(["-qq", "download"]).args(packages).current_dir(&debs).output();
        let download = download.map_err(|error| Unavailable(format!("apt-get cannot be run: {error}")))?;
        if !download.status.success() {
            let why = String::from_utf8_lossy(&download.stderr);
            bail!(Unavailable(format!("packages of {} cannot be fetched: {}", self.name, why.trim())));
        }
        for deb in fs::read_dir(&debs).context("listing packages")? {
            let deb = deb.context("listing packages")?.path();
            let status = Command::new("dpkg-deb").arg("--extract").arg(&deb).arg(root).status();
            let status = status.map_err(|error| Unavailable(format!("dpkg-deb cannot be run: {error}")))?;
            if !status.success() {
                bail!("unpacking {} failed ({status})", deb.display());
            }
            fs::remove_file(&deb).context("removing a package")?;
        }
        Ok(())
    }
}

fn is_wanted(name: &str, packages: &[&str]) -> bool {
    let unused = ["libpam", "libperl", "libpython"];
    packages.contains(&name)
        || ((name.starts_with("lib") || name.starts_with("zlib"))
            && !unused.iter().any(|prefix| name.starts_with(prefix)))
}

/// The server that this machine gets its own Debian packages from.
fn server() -> Result<String> {
    let release = fs::read_to_string("/etc/os-release").unwrap_or_default();
    let codename = release.lines().find_map(|line| line.strip_prefix("VERSION_CODENAME="));
    let codename = codename.unwrap_or("sid").trim_matches('"');
    let mut texts = Vec::new();
    let lists = fs::read_dir("/etc/apt/sources.list.d").into_iter().flatten().flatten().map(|entry| entry.path());
    let mut lists: Vec<PathBuf> = lists.chain([PathBuf::from("/etc/apt/sources.list")]).collect();
    lists.sort();
    for path in lists {
        let kind = path.extension().unwrap_or_default().to_string_lossy().into_owned();
        let text = fs::read_to_string(&path).unwrap_or_default();
        texts.push((kind, text));
    }
    let found = texts.iter().find_map(|(kind, text)| match kind.as_str() {
        "sources" => in_stanzas(text, codename),
        "list" => in_lines(text, codename),
        _ => None,
    });
    let is_debian = release.lines().any(|line| line == "ID=debian");
    found.filter(|_| is_debian).ok_or_else(|| {
        Unavailable(
            "this machine gets no Debian packages (needed: a Debian system whose sources name a server)".to_owned(),
        )
        .into()
    })
}

/// The server of a suite in the format of `sources.list(5)` that has stanzas.
fn in_stanzas(text: &str, suite: &str) -> Option<String> {
    let lines: Vec<&str> = text.lines().filter(|line| !line.starts_with('#')).collect();
    lines.split(|line| line.trim().is_empty()).find_map(|stanza| {
        let field = |name: &str| stanza.iter().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
        let has_suite = field("Suites")?.split_whitespace().any(|name| name == suite);
        let has_binaries = field("Types")?.split_whitespace().any(|kind| kind == "deb");
        let server = field("URIs")?.split_whitespace().next()?;
        (has_suite && has_binaries).then(|| server.to_owned())
    })
}

/// The same in the format with a line for each suite: `deb [options] server suite components`.
fn in_lines(text: &str, suite: &str) -> Option<String> {
    text.lines().find_map(|line| {
        let rest = line.trim().strip_prefix("deb ")?.trim_start();
        let rest = if rest.starts_with('[') { rest.split_once(']')?.1 } else { rest };
        let mut words = rest.split_whitespace();
        let server = words.next()?;
        (words.next()? == suite).then(|| server.to_owned())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_server_of_a_suite_is_found_in_both_formats() {
        let stanzas = "Types: deb-src\nURIs: http://src.test/debian\nSuites: trixie\n\n# a comment\nTypes: deb\n\
            URIs: http://a.test/debian http://b.test/debian\nSuites: trixie trixie-updates\nComponents: main\n";
        assert_eq!(in_stanzas(stanzas, "trixie").as_deref(), Some("http://a.test/debian"));
        assert_eq!(in_stanzas(stanzas, "bookworm"), None);
        let lines = "# deb http://no.test/debian trixie main\ndeb http://sec.test/debian trixie-security main\n\
            deb [arch=amd64 trusted=no] http://c.test/debian trixie main\n";
        assert_eq!(in_lines(lines, "trixie").as_deref(), Some("http://c.test/debian"));
        assert_eq!(in_lines(lines, "sid"), None);
    }

    #[test]
    fn libraries_are_wanted_and_services_are_not() {
        for name in ["fio", "libc6", "libgcc-s1"] {
            assert!(is_wanted(name, &["fio"]), "{name}");
        }
        for name in ["  Depends: libc6", "<libc6>", "perl-base", "libpam-modules", "systemd"] {
            assert!(!is_wanted(name, &["fio"]), "{name}");
        }
    }
}
