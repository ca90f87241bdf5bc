// Package reactor runs raw epoll loops: one locked thread each, edge-triggered,
// with a mailbox, a timer wheel and one flush at the end of each iteration.
//
//   - What a loop owns (sources, timers, buffers) is touched only on that loop;
//     Post is the one way in from elsewhere. Built with the race detector, a loop's
//     methods panic off its thread (owner_race.go).
//   - An iteration takes events, lets every source read and process, then
//     flushes everything that became dirty, once.
//   - Nothing on a loop may block. A panic in a source ends that source alone.
//   - Time comes from the injected clock.
//
// It knows no protocol, no pod and no policy.
package reactor

import (
	"errors"
	"fmt"
	"runtime"
	"runtime/debug"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Events a source is told of.
const (
	Readable = unix.EPOLLIN
	Writable = unix.EPOLLOUT
	PeerEnd  = unix.EPOLLRDHUP
	Urgent   = unix.EPOLLPRI
	Hangup   = unix.EPOLLHUP
	Error    = unix.EPOLLERR

	// Stream is the mask of an ordinary connected socket, registered once for its life.
	Stream = unix.EPOLLIN | unix.EPOLLOUT | unix.EPOLLRDHUP | unix.EPOLLPRI | unix.EPOLLET
	// Accept is the mask of a listening socket: level-triggered, so that a
	// budgeted accept comes back.
	Accept = unix.EPOLLIN
)

// Source is one file descriptor's handler. All methods run on its loop.
type Source interface {
	// Event tells what epoll saw.
	Event(events uint32)
	// Fail is called instead of anything else once a method of the source (or
	// its flush or timer) panicked: it must release what the source holds,
	// Unregister and close.
	Fail(cause error)
}

// Flusher is flushed at the end of an iteration in which it was marked Dirty.
type Flusher interface {
	Flush()
	Fail(cause error)
}

// Task is work put off to the next iteration, and woken timers.
type Task interface {
	Run()
	Fail(cause error)
}

// Blocking says how a loop waits when nothing is ready.
type Blocking uint8

const (
	// Safe gives the processor to the Go scheduler while it waits. The loop is a
	// goroutine like others, and yields to them every yieldEvery (decision 028).
	Safe Blocking = iota
	// Adapt keeps it for the first 5 ms of a wait, so that a busy loop's
	// wake-ups skip the scheduler, on a thread of the loop's own. It relies on
	// signal preemption to let the garbage collector stop the world, which then lasts
	// until the machine has run the loop's thread (decision 028).
	Adapt
)

// Config of a loop. The zero value is usable.
type Config struct {
	Blocking Blocking
	Now      func() int64                                     // monotonic nanoseconds; nil: the real clock
	Slow     time.Duration                                    // an iteration longer than this is reported; 0: 50 ms
	OnSlow   func(loop int, took time.Duration, stack string) // from the watchdog's goroutine; nil: counted only
	OnPanic  func(loop int, cause any, stack []byte)          // on the loop; nil: counted only
	ID       int
}

// Stats are a loop's counters; read from any goroutine.
type Stats struct {
	Iterations, Events, Wakeups, Panics, Slow uint64
	Busy                                      time.Duration // time spent not waiting, by the clock on the wall
	CPU                                       time.Duration // processor time of the loop's thread, as of at most cpuEvery of work ago
	// Took counts iterations by how long they were: at most each of Lags, and longer
	// than the last. An event that is ready while an iteration runs waits at most for its end.
	Took       [len(Lags) + 1]uint64
	Registered int64
}

// Lags are the bounds of Stats.Took.
var Lags = [...]time.Duration{
	50 * time.Microsecond, 100 * time.Microsecond, 250 * time.Microsecond, 500 * time.Microsecond, time.Millisecond,
	2500 * time.Microsecond, 5 * time.Millisecond, 10 * time.Millisecond, 25 * time.Millisecond, 50 * time.Millisecond, 250 * time.Millisecond, time.Second,
}

type slot struct {
	src Source
	gen uint32
}

// What one iteration does at most, so that none grows with what one crowd of
// sources has to do. The rest is done in the next iteration, which does not wait.
const (
	maxRounds = 64                           // waits of an iteration, of len(evs) events each, while sources put their events off
	maxMail   = 1024                         // posted functions run in one iteration
	maxTimers = 256                          // timers run in one iteration
	cpuEvery  = int64(20 * time.Millisecond) // between two readings of the thread's processor time
	// yieldEvery is a little less than the 10 ms after which the scheduler's monitor
	// takes a goroutine's processor away, in system calls too: a loop that makes
	// thousands a second met with that each time, and kept the monitor awake.
	yieldEvery = int64(8 * time.Millisecond)
)

// Loop is one epoll instance with its thread. Make it with New, start it with Run.
type Loop struct {
	cfg     Config
	owner   owner
	ep, efd int
	evs     [256]unix.EpollEvent
	tab     []slot // by fd
	last    int    // events of the last wait
	at      int    // of these, how many have been delivered

	dirty []Flusher
	tasks []Task // of the next iteration
	spare []Task // the queue that ran last
	after []Task // after the flush of this iteration

	mu     sync.Mutex
	mail   []func() // guarded by mu
	rung   bool     // the wakeup has been written since mail was last taken; guarded by mu
	dead   bool     // nothing is taken any more, and efd is closed; guarded by mu
	mail2  []func() // taken, and run up to taken
	taken  int
	behind bool // a part of the mail is left for the next iteration
	stop   bool

	putOff int // events of this iteration that their sources put off

	now     int64
	iter    uint64
	wheel   wheel        // timers
	fine    wheel        // those that are due soon
	started atomic.Int64 // start of the running iteration, 0 while there is none
	seen    int64        // watchdog: the iteration already reported

	cpuAt int64 // when cpu was last read

	// Of Run alone.
	yielded, ended int64 // when others had the loop's processor, and the last iteration's end
	tid            int   // thread of the last reading
	onThread       uint64
	busyThen       uint64

	iterations, events, wakeups, panics, slow, busy, cpu atomic.Uint64
	registered                                           atomic.Int64
	lags                                                 [len(Lags) + 1]atomic.Uint64

	// Scratch is a buffer that any source may use within one method call.
	Scratch [64 << 10]byte
	// Scratch2 likewise, for whoever holds Scratch already.
	Scratch2 [64 << 10]byte
}

var origin = time.Now()

// Monotonic is the default clock: nanoseconds since some moment before the process's first call.
func Monotonic() int64 { return int64(time.Since(origin)) + 1 }

// New makes a loop. It starts nothing.
func New(cfg Config) (*Loop, error) {
	if cfg.Now == nil {
		cfg.Now = Monotonic
	}
	if cfg.Slow == 0 {
		cfg.Slow = 50 * time.Millisecond
	}
	l := &Loop{cfg: cfg}
	var err error
	if l.ep, err = unix.EpollCreate1(unix.EPOLL_CLOEXEC); err != nil {
		return nil, fmt.Errorf("reactor: epoll_create: %w", err)
	}
	if l.efd, err = unix.Eventfd(0, unix.EFD_NONBLOCK|unix.EFD_CLOEXEC); err != nil {
		unix.Close(l.ep)
		return nil, fmt.Errorf("reactor: eventfd: %w", err)
	}
	l.now = cfg.Now()
	l.wheel.init(l.now, slotShift)
	l.fine.init(l.now, fineShift)
	if err := l.Register(l.efd, (*wakeup)(l), unix.EPOLLIN|unix.EPOLLET); err != nil {
		unix.Close(l.ep)
		unix.Close(l.efd)
		return nil, err
	}
	return l, nil
}

// wakeup is the mailbox's eventfd as a source.
type wakeup Loop

func (b *wakeup) Event(uint32) { // edge-triggered: the count need not be read to be told again
	if l := (*Loop)(b); !l.behind {
		l.takeMail()
	}
}

// Run is Task: the rest of a full mailbox.
func (b *wakeup) Run() {
	l := (*Loop)(b)
	l.behind = false
	l.takeMail()
	if l.behind {
		return
	}
	l.mu.Lock()
	more := len(l.mail) > 0 // for which the wakeup may have been written unread
	l.mu.Unlock()
	if more {
		l.mailLater()
	}
}

func (b *wakeup) Fail(error) {}

// Register adds fd with its source; mask stays for the fd's life. On the loop only.
func (l *Loop) Register(fd int, s Source, mask uint32) error {
	l.owner.check("Register")
	for len(l.tab) <= fd {
		l.tab = append(l.tab, make([]slot, max(64, len(l.tab)))...)
	}
	e := &l.tab[fd]
	ev := unix.EpollEvent{Events: mask, Fd: int32(fd), Pad: int32(e.gen + 1)}
	if err := unix.EpollCtl(l.ep, unix.EPOLL_CTL_ADD, fd, &ev); err != nil {
		return fmt.Errorf("reactor: epoll add %d: %w", fd, err) // whoever has fd registered keeps its events
	}
	e.gen++
	e.src = s
	l.registered.Add(1)
	return nil
}

// Replace gives a registered fd another source: an event of this very moment goes to the new one.
func (l *Loop) Replace(fd int, s Source) {
	l.owner.check("Replace")
	l.tab[fd].src = s
}

// Unregister drops fd's source; the caller closes fd next (which leaves epoll by itself) .
func (l *Loop) Unregister(fd int) {
	l.owner.check("Forget")
	if fd >= 0 && fd < len(l.tab) && l.tab[fd].src != nil {
		l.tab[fd].src = nil
		l.tab[fd].gen++
		l.registered.Add(-1)
	}
}

// Detach drops fd's source and takes fd out of epoll: for a socket that lives on elsewhere.
func (l *Loop) Detach(fd int) error {
	l.Unregister(fd)
	if err := unix.EpollCtl(l.ep, unix.EPOLL_CTL_DEL, fd, nil); err != nil {
		return fmt.Errorf("reactor: epoll del %d: %w", fd, err)
	}
	return nil
}

// Dirty queues f for this iteration's flush, or from an After task for the
// next one's, which then does not wait. The caller sees to it that f is queued once.
func (l *Loop) Dirty(f Flusher) {
	l.owner.check("Dirty")
	l.dirty = append(l.dirty, f)
}

// Later queues t for the next iteration, which then does not wait and runs t
// before it looks at events. The caller sees to it that t is queued once.
func (l *Loop) Later(t Task) {
	l.owner.check("Later")
	l.tasks = append(l.tasks, t)
}

// CountDeferred tells that the event being delivered was only noted: its source goes on
// with it later. An iteration looks for further events as long as it has handled
// fewer than one wait gives, so that a crowd of sources which may do nothing now
// does not stand before those that may.
func (l *Loop) CountDeferred() {
	l.owner.check("PutOff")
	l.putOff++
}

// Do runs t now, as the loop does: a panic is counted and ends t alone.
func (l *Loop) Do(t Task) {
	l.owner.check("Do")
	l.task(t)
}

// After runs t once this iteration's flush is over, when no queue holds what
// the iteration ended: the place to recycle. The caller sees to it that t is queued once.
func (l *Loop) After(t Task) {
	l.owner.check("After")
	l.after = append(l.after, t)
}

// Now is the time of this iteration in the clock's nanoseconds.
func (l *Loop) Now() int64 {
	l.owner.check("Now")
	return l.now
}

// Iteration numbers the running iteration.
func (l *Loop) Iteration() uint64 {
	l.owner.check("Iteration")
	return l.iter
}

// ID is the loop's number.
func (l *Loop) ID() int { return l.cfg.ID }

// ErrClosed: the loop has ended; what was posted will not run.
var ErrClosed = errors.New("reactor: loop has ended")

// Post runs f on the loop soon, in order. Safe from any goroutine.
func (l *Loop) Post(f func()) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.dead {
		return ErrClosed
	}
	l.mail = append(l.mail, f)
	if !l.rung { // under the lock: efd may be another's the moment the loop has ended
		l.rung = true
		l.wakeUp()
	}
	return nil
}

// wakeUp wakes the loop; mu is held.
func (l *Loop) wakeUp() {
	one := [8]byte{1}
	for {
		// A full counter already wakes the loop.
		if _, err := unix.Write(l.efd, one[:]); err != unix.EINTR {
			return
		}
	}
}

// takeMail runs what has been posted by now, up to maxMail of it; what is posted meanwhile waits
// for the next iteration.
func (l *Loop) takeMail() {
	l.wakeups.Add(1)
	if l.taken == len(l.mail2) {
		l.mu.Lock()
		l.mail, l.mail2, l.taken = l.mail2[:0], l.mail, 0
		l.rung = false
		l.mu.Unlock()
	}
	for n := 0; l.taken < len(l.mail2); n++ {
		if n == maxMail {
			l.mailLater()
			return
		}
		f := l.mail2[l.taken]
		l.mail2[l.taken] = nil
		l.taken++
		l.call(f)
	}
}

// mailLater goes on in the next iteration; until then the wakeup is not read.
func (l *Loop) mailLater() {
	l.behind = true
	l.Later((*wakeup)(l))
}

// Stop ends Run after the running iteration. Safe from any goroutine.
func (l *Loop) Stop() { _ = l.Post(func() { l.stop = true }) }

// Run is the loop; it returns after Stop. Sources still registered are told to
// Fail with ErrClosed. Call it once.
func (l *Loop) Run() {
	if l.cfg.Blocking == Adapt || ownThread {
		runtime.LockOSThread()
	}
	l.owner.take()
	l.mark()
	for !l.stop {
		l.iterate(true)
		if l.cfg.Blocking == Safe && l.now-l.yielded >= yieldEvery {
			l.readCPU()
			runtime.Gosched()
			l.mark() // on another thread, maybe
			l.yielded = l.now
		}
	}
	l.failAll()
	l.mu.Lock()
	l.dead = true
	q := append(l.mail2[l.taken:], l.mail...)
	l.mail, l.mail2, l.taken = nil, nil, 0
	l.Unregister(l.efd)
	unix.Close(l.efd)
	l.efd = -1
	l.mu.Unlock()
	for _, f := range q { // what arrived before the end still runs: it may own a descriptor
		l.call(f)
	}
	l.failAll() // what that registered
	l.flush()
	l.failAll()
	l.started.Store(0)
	unix.Close(l.ep)
}

// failAll ends every source, and those that the end of others registered: a
// request that is tried again opens a connection.
func (l *Loop) failAll() {
	const rounds = 16 // a source that always registers another ends nothing
	for more, n := true, 0; more && n < rounds; n++ {
		more = false
		for fd := 0; fd < len(l.tab); fd++ {
			if s := l.tab[fd].src; s != nil && fd != l.efd {
				more = true
				l.failSource(s, ErrClosed)
			}
		}
	}
}

func (l *Loop) iterate(block bool) {
	timeout := l.timeout()
	if !block || len(l.tasks)+len(l.dirty) > 0 {
		timeout = 0
	}
	n := l.wait(timeout)
	l.now = l.cfg.Now()
	if l.now-l.ended >= yieldEvery { // a wait that long is a yield
		l.yielded = l.now
	}
	l.started.Store(l.now)
	l.iter++
	l.iterations.Store(l.iter)
	tasks := l.tasks
	l.tasks = l.spare[:0]
	l.run(tasks)
	l.spare = tasks
	for handled, round := 0, 1; ; round++ {
		l.events.Add(uint64(n))
		l.putOff = 0
		l.deliver(n)
		if handled += n - l.putOff; n < len(l.evs) || handled >= len(l.evs) || round == maxRounds {
			break
		}
		n = l.wait(0)
	}
	l.wheel.advance(l, l.now)
	l.fine.advance(l, l.now)
	l.flush()
	l.ended = l.cfg.Now()
	took := l.ended - l.now
	l.busy.Add(uint64(took))
	i := 0
	for i < len(Lags) && took > int64(Lags[i]) {
		i++
	}
	l.lags[i].Add(1)
	if l.now-l.cpuAt >= cpuEvery {
		l.cpuAt = l.now
		l.readCPU()
	}
	l.started.Store(0) // a yield is no part of it
}

// deliver tells the sources of the first n events.
func (l *Loop) deliver(n int) {
	for i := range n {
		l.at = i + 1
		ev := &l.evs[i]
		if int(ev.Fd) >= len(l.tab) {
			continue
		}
		if e := &l.tab[ev.Fd]; e.src != nil && int32(e.gen) == ev.Pad {
			l.event(e.src, ev.Events)
		}
	}
}

// Pending is what epoll saw of fd that has not been delivered yet in this iteration, but may be
// older than what was read since; 0: nothing.
func (l *Loop) Pending(fd int) uint32 {
	l.owner.check("Pending")
	for i := l.at; i < l.last; i++ {
		if ev := &l.evs[i]; int(ev.Fd) == fd && ev.Pad == int32(l.tab[fd].gen) {
			return ev.Events
		}
	}
	return 0
}

// readCPU adds the processor time since the last mark or reading: what others on the
// machine take of it is not in it. Where the scheduler has moved the loop to another thread
// meanwhile, which it seldom does outside of a yield, the time it was busy counts.
func (l *Loop) readCPU() {
	tid, onThread, busy := l.tid, l.onThread, l.busyThen
	l.mark()
	if l.tid == tid {
		l.cpu.Add(l.onThread - onThread)
	} else {
		l.cpu.Add(l.busyThen - busy)
	}
}

// mark notes where the processor time counts from.
func (l *Loop) mark() {
	l.tid, l.busyThen = unix.Gettid(), l.busy.Load()
	var t unix.Timespec
	if unix.ClockGettime(unix.CLOCK_THREAD_CPUTIME_ID, &t) == nil {
		l.onThread = uint64(t.Nano())
	}
}

func (l *Loop) run(q []Task) {
	for i, t := range q {
		q[i] = nil
		l.task(t)
	}
}

func (l *Loop) flush() {
	for i := 0; i < len(l.dirty); i++ { // a flush may dirty others
		f := l.dirty[i]
		l.dirty[i] = nil
		l.flushOne(f)
	}
	l.dirty = l.dirty[:0]
	for i := 0; i < len(l.after); i++ {
		t := l.after[i]
		l.after[i] = nil
		l.task(t)
	}
	l.after = l.after[:0]
}

// timeout is how long a wait may last in milliseconds; -1: until something happens.
func (l *Loop) timeout() int {
	at, ok := l.fine.next()
	if coarse, some := l.wheel.next(); some && (!ok || coarse < at) {
		at, ok = coarse, true
	}
	if !ok {
		return -1
	}
	d := at - l.cfg.Now()
	if d <= 0 {
		return 0
	}
	return int(min((d+999_999)/1_000_000, 60_000))
}

func (l *Loop) wait(ms int) int {
	l.at = 0
	p := uintptr(unsafe.Pointer(&l.evs[0]))
	ep := uintptr(l.ep)
	if l.last >= 2 || ms == 0 { // under load a poll that does not block is cheaper
		n, _, e := syscall.RawSyscall6(unix.SYS_EPOLL_PWAIT, ep, p, uintptr(len(l.evs)), 0, 0, 8)
		if e == 0 && int(n) > 0 || ms == 0 {
			if e != 0 {
				n = 0
			}
			l.last = int(n)
			return int(n)
		}
	}
	if l.cfg.Blocking == Adapt && (ms < 0 || ms > 5) {
		n, _, e := syscall.RawSyscall6(unix.SYS_EPOLL_PWAIT, ep, p, uintptr(len(l.evs)), 5, 0, 8)
		if e == 0 && int(n) > 0 {
			l.last = int(n)
			return int(n)
		}
		if e != 0 { // EINTR: the runtime wants this thread; come back through the scheduler
			runtime.Gosched()
		}
	}
	n, _, e := syscall.Syscall6(unix.SYS_EPOLL_PWAIT, ep, p, uintptr(len(l.evs)), uintptr(ms), 0, 8)
	if e != 0 {
		n = 0
	}
	l.last = int(n)
	return int(n)
}

func (l *Loop) caught(cause any) error {
	l.panics.Add(1)
	if l.cfg.OnPanic != nil {
		l.cfg.OnPanic(l.cfg.ID, cause, debug.Stack())
	}
	return fmt.Errorf("panic: %v", cause)
}

func (l *Loop) event(s Source, ev uint32) {
	defer func() {
		if p := recover(); p != nil {
			l.failSource(s, l.caught(p))
		}
	}()
	s.Event(ev)
}

func (l *Loop) flushOne(f Flusher) {
	defer func() {
		if p := recover(); p != nil {
			l.failSource(f, l.caught(p))
		}
	}()
	f.Flush()
}

func (l *Loop) task(t Task) {
	defer func() {
		if p := recover(); p != nil {
			l.failSource(t, l.caught(p))
		}
	}()
	t.Run()
}

func (l *Loop) failSource(s interface{ Fail(error) }, err error) {
	defer func() {
		if p := recover(); p != nil {
			l.caught(p)
		}
	}()
	s.Fail(err)
}

func (l *Loop) call(f func()) {
	defer func() {
		if p := recover(); p != nil {
			l.caught(p)
		}
	}()
	f()
}

// Stats returns the counters. Safe from any goroutine.
func (l *Loop) Stats() Stats {
	s := Stats{
		Iterations: l.iterations.Load(), Events: l.events.Load(), Wakeups: l.wakeups.Load(),
		Panics: l.panics.Load(), Slow: l.slow.Load(),
		Busy: time.Duration(l.busy.Load()), CPU: time.Duration(l.cpu.Load()), Registered: l.registered.Load(),
	}
	for i := range s.Took {
		s.Took[i] = l.lags[i].Load()
	}
	return s
}

// Check is called regularly by a watchdog goroutine: an iteration that runs
// longer than Config.Slow is counted and reported once, with the stacks of all goroutines.
func (l *Loop) Check() {
	at := l.started.Load()
	if at == 0 || at == l.seen {
		return
	}
	took := time.Duration(l.cfg.Now() - at)
	if took < l.cfg.Slow {
		return
	}
	l.seen = at
	l.slow.Add(1)
	if l.cfg.OnSlow != nil {
		buf := make([]byte, 64<<10)
		buf = buf[:runtime.Stack(buf, true)]
		l.cfg.OnSlow(l.cfg.ID, took, string(buf))
	}
}

// Each calls f with every registered source. On the loop only; f may Forget.
// A panic in f is counted and ends that call alone.
func (l *Loop) Each(f func(s Source)) {
	l.owner.check("Each")
	for fd := range l.tab {
		if s := l.tab[fd].src; s != nil && fd != l.efd {
			l.each(f, s)
		}
	}
}

func (l *Loop) each(f func(s Source), s Source) {
	defer func() {
		if p := recover(); p != nil {
			l.caught(p)
		}
	}()
	f(s)
}
