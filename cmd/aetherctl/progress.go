package main

import (
	"fmt"
	"io"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// progress tells on a terminal how far a file has been read, once that takes longer than
// progressAfter. Not safe for concurrent use.
type progress struct {
	w   io.Writer // nil: nobody looks
	now func() time.Time

	name         string
	r            io.Reader
	size, read   int64
	start, shown time.Time
	up           bool // a line stands on the terminal
}

const (
	progressAfter = time.Second
	progressEvery = 200 * time.Millisecond
	clearLine     = "\r\x1b[K"
)

// newProgress makes one that is silent unless w is a terminal.
func newProgress(w io.Writer, now func() time.Time) *progress {
	p := &progress{now: now}
	if f, ok := w.(*os.File); ok {
		if _, err := unix.IoctlGetTermios(int(f.Fd()), unix.TCGETS); err == nil {
			p.w = w
		}
	}
	return p
}

// of is r, which is called name and has size bytes (0: not known), watched.
func (p *progress) of(name string, r io.Reader, size int64) io.Reader {
	if p.w == nil {
		return r
	}
	p.clear()
	p.name, p.r, p.size, p.read, p.start = name, r, size, 0, p.now()
	p.shown = p.start
	return p
}

func (p *progress) Read(b []byte) (int, error) {
	n, err := p.r.Read(b)
	p.read += int64(n)
	if now := p.now(); now.Sub(p.start) >= progressAfter && now.Sub(p.shown) >= progressEvery {
		p.shown = now
		p.show(now.Sub(p.start))
	}
	return n, err
}

func (p *progress) show(took time.Duration) {
	const mb = 1e6
	line := fmt.Sprintf("%s: %.0f MB", oneWord(p.name), float64(p.read)/mb)
	if p.size > 0 {
		line = fmt.Sprintf("%s: %.0f of %.0f MB, %d %%", oneWord(p.name), float64(p.read)/mb, float64(p.size)/mb, 100*p.read/p.size)
	}
	if p.size > p.read && p.read > 0 {
		left := time.Duration(float64(took) * float64(p.size-p.read) / float64(p.read))
		line += fmt.Sprintf(", %v left", left.Round(time.Second))
	}
	fmt.Fprint(p.w, clearLine, line)
	p.up = true
}

// clear takes the line away.
func (p *progress) clear() {
	if p.up {
		fmt.Fprint(p.w, clearLine)
		p.up = false
	}
}

// before is w for output that may stand on the same terminal: the line goes before it comes.
func (p *progress) before(w io.Writer) io.Writer {
	if p.w == nil {
		return w
	}
	return writer(func(b []byte) (int, error) {
		p.clear()
		return w.Write(b)
	})
}

type writer func([]byte) (int, error)

func (f writer) Write(b []byte) (int, error) { return f(b) }
