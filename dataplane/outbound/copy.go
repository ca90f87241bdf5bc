package outbound

import (
	"time"

	"aether/dataplane/exchange"
	"aether/dataplane/httpmsg"
	"aether/dataplane/reactor"
)

// mirror is a copy of a request on its way to another backend. It is the client of an
// exchange of its own, reads the answer and throws it away; nothing of it comes back to
// the request it is a copy of.
type mirror struct {
	x     *exchange.Exchange
	st    *loopState
	of    *upstreams // of the pod whose request it is a copy of
	next  *mirror    // of the same request
	whole bool       // all there is of the request has been pushed
	full  bool       // the answer was too long, and its end is on its way
	ended bool
	read  int // of the answer
	how   int // why it was given up; mirrorResults: it was not
	wait  reactor.Timer
}

// count counts n more mirrors under way.
func (m *mirror) count(n int) {
	m.st.mirrors += n
	m.of.mirrors += n
}

// TapData is exchange.Tap.
func (m *mirror) TapData(p []byte, end bool) {
	for ; m != nil; m = m.next {
		if m.ended {
			continue
		}
		if !m.x.Push(p, end, mirrorBehind) {
			m.giveUp(mirrorSlow)
			continue
		}
		m.sent(end)
	}
}

// TapTrailers is exchange.Tap.
func (m *mirror) TapTrailers(f []httpmsg.Field) {
	for ; m != nil; m = m.next {
		if !m.ended {
			m.x.PushTrailers(f)
			m.sent(true)
		}
	}
}

// sent: the request has been pushed, up to its end.
func (m *mirror) sent(end bool) {
	if end && !m.ended {
		m.whole = true
		m.st.l.Arm(&m.wait, (*mirrorLate)(m), int64(mirrorWait))
	}
}

// orphaned ends the mirrors of a request that is over, as far as they wait for more of it.
func (m *mirror) orphaned() {
	for ; m != nil; m = m.next {
		if !m.whole {
			m.giveUp(mirrorCut)
		}
	}
}

func (m *mirror) giveUp(how int) {
	if !m.ended {
		m.how = how
		m.x.Abort(exchange.Cancel)
	}
}

// WriteHead is exchange.Stream.
func (*mirror) WriteHead(*httpmsg.Head, bool) {}

// WriteData is exchange.Stream.
func (m *mirror) WriteData(p []byte, _ bool) int {
	if m.read += len(p); m.read > mirrorAnswer && !m.full {
		m.full = true
		m.st.l.Later((*mirrorFull)(m))
	}
	return len(p)
}

// WriteTrailers is exchange.Stream.
func (*mirror) WriteTrailers([]httpmsg.Field) {}

// Resume is exchange.Stream: what is pushed is not held back.
func (*mirror) Resume() {}

// Abort is exchange.Stream.
func (*mirror) Abort(exchange.Code) {}

// mirrorFull is a mirror as the task that ends an answer of which enough has been read.
type mirrorFull mirror

// Run is reactor.Task.
func (t *mirrorFull) Run() {
	if m := (*mirror)(t); !m.ended {
		m.x.Abort(exchange.NoError)
	}
}

// Fail is reactor.Task.
func (t *mirrorFull) Fail(error) {}

// mirrorLate is a mirror as the task of its limit of time.
type mirrorLate mirror

// Run is reactor.Task.
func (t *mirrorLate) Run() { (*mirror)(t).giveUp(mirrorTimeout) }

// Fail is reactor.Task.
func (t *mirrorLate) Fail(error) {}

// Bounds of mirrors (Gateway API HTTPRequestMirrorFilter; decision 017).
const (
	maxMirrors   = 256      // under way, of a loop; see package share for a pod's part
	mirrorBehind = 64 << 10 // what is kept of a body that a mirror does not take as fast as it comes
	mirrorAnswer = 1 << 20  // of an answer, which nobody wants, is read
	mirrorWait   = 15 * time.Second
)
