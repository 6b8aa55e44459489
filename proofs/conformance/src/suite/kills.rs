//! Servers that are killed, over and over, under hosts that have file systems mounted: what `fsync` acknowledged is there.
//!
//! One server serves two targets, on which the guest has ext4 and xfs and writes files at all times (`conformance guest
//! write-files`). It is killed at some moment and started again; the host connects again by itself and goes on. After each kill
//! every page of every file has to be what was acknowledged, and calls of `fsync` were acknowledged since. None of them
//! may fail: what a server has answered outlives its process, so nothing is gone that a flush would have to report. At the
//! end the file systems are unmounted, checked, and mounted again on connections of their own.

use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, bail};

use crate::context::{TestContext, expect};
use crate::served::Server;

/// File systems, each also the name of its subsystem.
const FILE_SYSTEMS: [&str; 2] = ["ext4", "xfs"];
/// The host's patience: it tries again each second.
const OPTIONS: &str = "--reconnect-delay=1 --ctrl-loss-tmo=300";
/// A server is killed after this time at least and at most, since the host was seen to work.
const UNDER_LOAD_MS: std::ops::Range<u64> = 50..700;
/// One kill of so many is followed by a pause in which the host tries in vain.
const LONG_EVERY: u32 = 4;
const LONG: Duration = Duration::from_millis(1300);
/// The time in which a mirror brings the blocks in step that were written when its server was killed.
const IN_SYNC_TRIES: u32 = 300;

/// What is served.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Served {
    Volume,
    Mirror,
}

impl Served {
    /// The target of a file system.
    fn target(self, kind: &str) -> String {
        match self {
            Served::Volume => kind.to_owned(),
            Served::Mirror => format!("mirror:{kind}-a,{kind}-b"),
        }
    }

    /// Makes what one is made of. A file system of less than 300 MiB is none of xfs's.
    fn create(self, context: &TestContext<'_>, kind: &str) -> Result<()> {
        let create = |name: &str| context.sealblock.create(name, "400MiB", &[]);
        match self {
            Served::Volume => create(kind),
            Served::Mirror => {
                let members = [format!("{kind}-a"), format!("{kind}-b")];
                members.iter().try_for_each(|name| create(name))?;
                context.sealblock.succeed(&["mirror", "create", &members[0], &members[1]]).map(drop)
            }
        }
    }
}

/// What the writers say: acknowledged calls of `fsync` of each file system, and files of both together.
struct Answers {
    acknowledged: Vec<u64>,
    files: u64,
}

pub fn run(context: &mut TestContext<'_>) -> Result<()> {
    for served in [Served::Volume, Served::Mirror] {
        one(context, served).with_context(|| format!("what is served: {served:?}"))?;
    }
    Ok(())
}

fn one(context: &mut TestContext<'_>, served: Served) -> Result<()> {
    let mut configuration = String::new();
    for kind in FILE_SYSTEMS {
        served.create(context, kind)?;
        let target = served.target(kind);
        configuration += &format!("[[subsystems]]\nname = \"{kind}\"\nnamespaces = [{{ target = \"{target}\" }}]\n");
    }
    context.sealblock.configure(&configuration)?;
    let mut server = context.sealblock.serve_configured()?;
    context.sh(&server, &script(MOUNT))?;
    let (first, mut random) = (answers(context, &server, "first")?, fastrand::Rng::with_seed(38));
    let (mut before, mut checked) = (first.acknowledged.clone(), 0);
    for kill in 1..=context.kills {
        thread::sleep(Duration::from_millis(random.u64(UNDER_LOAD_MS)));
        server.kill()?;
        if kill % LONG_EVERY == 0 {
            thread::sleep(LONG);
        }
        server.start()?;
        let now = answers(context, &server, &format!("{kill}")).with_context(|| format!("after kill {kill}"))?;
        if now.acknowledged.iter().zip(&before).any(|(now, before)| now <= before) {
            bail!("nothing was acknowledged since kill {kill}: {before:?} calls of fsync, {:?} now", now.acknowledged);
        }
        (before, checked) = (now.acknowledged, checked + now.files);
    }
    println!(
        "{}.{:<4} kills: {} of a server of {served:?}: {before:?} calls of fsync acknowledged on {FILE_SYSTEMS:?}, {checked} files checked",
        context.version.0, context.version.1, context.kills
    );
    context.sh(&server, &script(END)).with_context(|| format!("after {} kills, mounted again", context.kills))?;
    in_sync(context, served)?;
    server.stop()?;
    for kind in FILE_SYSTEMS {
        context.sealblock.succeed(&["verify", &served.target(kind)])?;
    }
    Ok(())
}

fn script(text: &str) -> String {
    text.replace("@OPTIONS@", OPTIONS)
}

/// Has both writers look at all that they wrote.
fn answers(context: &mut TestContext<'_>, server: &Server, question: &str) -> Result<Answers> {
    let said = context.sh(server, &CHECK.replace("@QUESTION@", question))?;
    let mut answers = Answers { acknowledged: Vec::new(), files: 0 };
    for line in said.lines() {
        let words: Vec<&str> = line.split(' ').collect();
        let [asked, acknowledged, files] = words[..] else { bail!("a writer answers {line:?}") };
        expect("question that was answered", &asked, &question)?;
        answers.acknowledged.push(acknowledged.parse()?);
        answers.files += files.parse::<u64>()?;
    }
    expect("writers that answered", &answers.acknowledged.len(), &FILE_SYSTEMS.len())?;
    Ok(answers)
}

/// Waits until no replica lacks anything.
fn in_sync(context: &TestContext<'_>, served: Served) -> Result<()> {
    if served == Served::Volume {
        return Ok(());
    }
    for kind in FILE_SYSTEMS {
        let target = served.target(kind);
        let mut tries = 0;
        loop {
            let said = context.sealblock.run(&["mirror", "status", &target])?;
            if said.status.success() {
                break;
            }
            tries += 1;
            if tries > IN_SYNC_TRIES {
                bail!("{target} is not in sync: {}", String::from_utf8_lossy(&said.stdout));
            }
            thread::sleep(Duration::from_millis(100));
        }
    }
    Ok(())
}

/// File systems, and a writer on each.
const MOUNT: &str = r#"
mark
for kind in ext4 xfs; do
  dev=$(attach $kind @OPTIONS@)
  case $kind in
    ext4) /usr/bin/mke2fs -q -F -t ext4 /dev/$dev ;;
    xfs) mkfs.xfs -q -f /dev/$dev ;;
  esac
  mkdir -p /mnt/$kind
  mount -t $kind -o discard /dev/$dev /mnt/$kind
  rm -f /tmp/$kind.*
  (
    conformance guest write-files /mnt/$kind /tmp/$kind 4711 && status=0 || status=$?
    echo $status >/tmp/$kind.status
  ) >/tmp/$kind.said 2>&1 &
done
"#;

/// Each writer looks at all pages and answers. A file system that has found fault with its device fails the test.
const CHECK: &str = r#"
for kind in ext4 xfs; do
  echo @QUESTION@ >/tmp/$kind.new
  mv /tmp/$kind.new /tmp/$kind.ask
done
for kind in ext4 xfs; do
  for try in $(seq 600); do
    [ -e /tmp/$kind.status ] && { cat /tmp/$kind.said; fail "the writer on $kind has ended"; }
    [ "$(cut -d ' ' -f 1 /tmp/$kind.answer 2>/dev/null)" = @QUESTION@ ] && break
    sleep 0.1
  done
  cat /tmp/$kind.answer
  grep -q " /mnt/$kind $kind rw," /proc/mounts || { grep /mnt/ /proc/mounts; fail "$kind is no longer writable"; }
done
said | grep -E 'EXT4-fs (error|warning)|XFS .*([Ee]rror|[Ss]hut|orrupt)|Buffer I/O error|lost (async|sync) page' >/tmp/faults &&
  { cat /tmp/faults; fail "a file system has found faults"; }
true
"#;

/// The writers end; everything is there through new mounts on new connections, and the file systems are whole.
const END: &str = r#"
for kind in ext4 xfs; do
  echo end >/tmp/$kind.new
  mv /tmp/$kind.new /tmp/$kind.ask
done
for kind in ext4 xfs; do
  for try in $(seq 300); do
    [ -e /tmp/$kind.status ] && break
    sleep 0.1
  done
  [ "$(cat /tmp/$kind.status)" = 0 ] || { cat /tmp/$kind.said; fail "the writer on $kind"; }
  umount /mnt/$kind
  detach $kind
  dev=$(attach $kind)
  case $kind in
    ext4) e2fsck -f -n /dev/$dev ;;
    xfs) xfs_repair -n /dev/$dev ;;
  esac >/tmp/fsck 2>&1 || { cat /tmp/fsck; fail "$kind is damaged"; }
  mount -t $kind /dev/$dev /mnt/$kind
  conformance guest check-files /mnt/$kind /tmp/$kind.list || fail "$kind has lost something"
  umount /mnt/$kind
  detach $kind
done
"#;
