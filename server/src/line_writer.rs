//! Lines for a standard stream, written by a thread of their own: a reader that does not read them delays no request, and
//! not the end of the server.
//!
//! Invariants: lines keep their order, and each is written whole. At most 1024 of them wait; further ones are dropped
//! and counted, and the number is reported when lines are read again.

use std::io::{self, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::thread;
use std::time::{Duration, Instant};

/// The maximum number of lines that wait.
const MAX_WAITING: usize = 1024;
/// How long the end waits for lines to be read.
const MAX_FINISH: Duration = Duration::from_secs(1);
/// The interval between attempts while all places are taken.
const RETRY_INTERVAL: Duration = Duration::from_millis(5);

enum Item {
    Lines(Vec<u8>),
    /// Answered when everything before it is written.
    Flush(SyncSender<()>),
}

/// Writes lines without waiting for their reader.
#[derive(Clone)]
pub struct LineWriter {
    items: SyncSender<Item>,
    lost: Arc<AtomicU64>,
}

impl LineWriter {
    /// A writer to this stream. `lost_text` makes the line about a number of lines that were dropped, or an empty one.
    ///
    /// # Errors
    /// If no thread can be started.
    pub fn start(
        mut output: impl Write + Send + 'static,
        lost_text: impl Fn(u64) -> Vec<u8> + Send + 'static,
    ) -> io::Result<LineWriter> {
        let (items, waiting) = sync_channel(MAX_WAITING);
        let lost = Arc::new(AtomicU64::new(0));
        let writer = LineWriter { items, lost: Arc::clone(&lost) };
        let write = move || write_all(&waiting, &mut output, &lost, lost_text);
        thread::Builder::new().name("lines".to_owned()).spawn(write)?;
        Ok(writer)
    }

    /// Writes lines, which include their ends.
    pub fn put(&self, lines: Vec<u8>) {
        if let Err(TrySendError::Full(_)) = self.items.try_send(Item::Lines(lines)) {
            self.lost.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Waits until all lines are written, or for a second if nobody reads them.
    pub fn finish(&self) {
        let deadline = Instant::now() + MAX_FINISH;
        let (flushed, is_flushed) = sync_channel(1);
        let mut flush = Item::Flush(flushed);
        while let Err(TrySendError::Full(back)) = self.items.try_send(flush) {
            if Instant::now() >= deadline {
                return;
            }
            thread::sleep(RETRY_INTERVAL);
            flush = back;
        }
        // Fails when the time is over.
        let _ = is_flushed.recv_timeout(deadline.saturating_duration_since(Instant::now()));
    }
}

impl Write for LineWriter {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.put(bytes.to_vec());
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn write_all(waiting: &Receiver<Item>, output: &mut impl Write, lost: &AtomicU64, lost_text: impl Fn(u64) -> Vec<u8>) {
    // A reader that is gone is no reason to end.
    let mut write = |bytes: &[u8]| drop(output.write_all(bytes).and_then(|()| output.flush()));
    while let Ok(item) = waiting.recv() {
        match item {
            Item::Lines(lines) => {
                write(&lines);
                match lost.swap(0, Ordering::Relaxed) {
                    0 => {}
                    lost => write(&lost_text(lost)),
                }
            }
            Item::Flush(flushed) => drop(flushed.send(())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::{Mutex, MutexGuard};

    /// A stream whose reader can be stopped.
    #[derive(Clone, Default)]
    struct Output(Arc<Mutex<Vec<u8>>>);

    impl Output {
        fn stop(&self) -> MutexGuard<'_, Vec<u8>> {
            self.0.lock().unwrap()
        }
    }

    impl Write for Output {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.stop().extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn start(output: &Output) -> LineWriter {
        LineWriter::start(output.clone(), |lost| format!("{lost} lost\n").into_bytes()).unwrap()
    }

    #[test]
    fn lines_are_written_in_order_by_the_end() {
        let output = Output::default();
        let writer = start(&output);
        (0..100).for_each(|number| writer.put(format!("{number}\n").into_bytes()));
        writer.finish();
        let expected: String = (0..100).map(|number| format!("{number}\n")).collect();
        assert_eq!(*output.stop(), expected.into_bytes());
    }

    #[test]
    fn a_reader_that_stops_delays_nobody_and_is_told_what_it_missed() {
        let output = Output::default();
        let writer = start(&output);
        let stopped = output.stop();
        let begun = Instant::now();
        (0..MAX_WAITING + 101).for_each(|_| writer.put(b"x\n".to_vec()));
        writer.finish();
        assert!(begun.elapsed() >= MAX_FINISH, "it waits for a moment");
        drop(stopped);
        writer.finish();
        let text = String::from_utf8(output.stop().clone()).unwrap();
        let lines = text.lines().filter(|line| *line == "x").count();
        let lost = text.lines().filter_map(|line| line.strip_suffix(" lost")?.parse::<usize>().ok()).sum::<usize>();
        assert_eq!(lines + lost, MAX_WAITING + 101);
        assert!((100..=101).contains(&lost), "{lost}: one may have been taken already");
    }
}
