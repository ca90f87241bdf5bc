package exchange_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"aether/dataplane/exchange"
	"aether/dataplane/httpmsg"
)

// tape is a stream that writes down what it is told; room bounds WriteData.
type tape struct {
	said []string
	room int
}

func (s *tape) WriteHead(h *httpmsg.Head, end bool) {
	cl, _ := h.Get("content-length")
	what := string(h.Method)
	if what == "" {
		what = fmt.Sprint(h.Status)
	}
	s.said = append(s.said, fmt.Sprintf("head %s len=%s end=%v", what, cl, end))
}

func (s *tape) WriteData(p []byte, end bool) int {
	n := min(len(p), s.room)
	s.room -= n
	s.said = append(s.said, fmt.Sprintf("data %s end=%v", p[:n], end && n == len(p)))
	return n
}
func (s *tape) WriteTrailers([]httpmsg.Field) { s.said = append(s.said, "trailers") }
func (s *tape) Resume()                       { s.said = append(s.said, "resume") }
func (s *tape) Abort(c exchange.Code)         { s.said = append(s.said, "abort "+c.String()) }

// holder is a Holder that f goes on for.
type holder struct {
	why exchange.Held
	n   int
	f   func(x *exchange.Exchange)
}

func (h *holder) Held(x *exchange.Exchange, why exchange.Held) {
	h.why = why
	h.n++
	if h.f != nil {
		h.f(x)
	}
}

// script is a service made of functions; nil: nothing.
type script struct {
	request  func(x *exchange.Exchange)
	response func(x *exchange.Exchange, h *httpmsg.Head)
	failed   func(x *exchange.Exchange, c exchange.Code)
	done     int
}

func (s *script) Request(x *exchange.Exchange) { s.request(x) }
func (s *script) Response(x *exchange.Exchange, h *httpmsg.Head) {
	if s.response != nil {
		s.response(x, h)
	}
}
func (s *script) Failed(x *exchange.Exchange, c exchange.Code) {
	if s.failed != nil {
		s.failed(x, c)
	}
}
func (s *script) Done(*exchange.Exchange) { s.done++ }

func post(length int64) *httpmsg.Head {
	return &httpmsg.Head{Method: []byte("POST"), Path: []byte("/"), Length: length, Minor: 1}
}

func field(name, value string) httpmsg.Field {
	return httpmsg.Field{Name: []byte(name), Value: []byte(value)}
}

// TestSequences plays events at one exchange and holds its commands to both streams.
func TestSequences(t *testing.T) {
	ok := &httpmsg.Head{Status: 200, Length: httpmsg.Unknown}
	for _, tt := range []struct {
		name     string
		play     func(s *script, p *exchange.Pool, down, up *tape)
		down, up string
	}{
		{"an empty chunked body that ends while the request waits", func(s *script, p *exchange.Pool, down, up *tape) {
			s.request = func(x *exchange.Exchange) {}
			x := p.Begin(down, post(httpmsg.Unknown), false, nil, 0)
			x.Begin()
			x.RequestData(nil, true)
			x.Forward(up)
		}, "", "head POST len= end=true"},
		{"the same, sent a second time", func(s *script, p *exchange.Pool, down, up *tape) {
			s.request = func(x *exchange.Exchange) { x.Forward(&tape{}) }
			s.failed = func(x *exchange.Exchange, _ exchange.Code) {
				if x.Replayable() {
					x.Forward(up)
				}
			}
			x := p.Begin(down, post(httpmsg.Unknown), false, nil, 0)
			x.Begin()
			x.RequestData(nil, true)
			x.UpstreamClosed(exchange.Stale)
		}, "resume", "head POST len= end=true"},
		{"what has an answer of ours goes nowhere, and what comes from there is nobody's", func(s *script, p *exchange.Pool, down, up *tape) {
			s.request = func(x *exchange.Exchange) {}
			x := p.Begin(down, post(0), true, nil, 0)
			x.Begin()
			x.Reply(&httpmsg.Head{Status: 504}, []byte("late"))
			x.Forward(up)
			x.ResponseHead(ok, false)
			x.ResponseData([]byte("theirs"), true)
			x.ResponseTrailers(nil)
			x.UpstreamClosed(exchange.Closed)
			down.room = 4
			x.DownstreamWritable()
		}, "head 504 len=4 end=false, data  end=false, data late end=true", "abort cancel"},
		{"trailers that are gone cannot be sent again", func(s *script, p *exchange.Pool, down, up *tape) {
			s.request = func(x *exchange.Exchange) { x.Forward(up) }
			s.failed = func(x *exchange.Exchange, _ exchange.Code) {
				if x.Replayable() {
					t.Error("replayable")
				}
			}
			x := p.Begin(down, post(httpmsg.Unknown), false, nil, 0)
			x.Begin()
			x.RequestTrailers([]httpmsg.Field{field("a", "b")})
			x.UpstreamClosed(exchange.Stale)
		}, "resume, head 503 len=0 end=true", "head POST len= end=false, trailers"},
		{"a body that is kept is sent again, and the rest after it", func(s *script, p *exchange.Pool, down, up *tape) {
			first := &tape{room: 100}
			s.request = func(x *exchange.Exchange) { x.KeepForReplay(); x.Forward(first) }
			s.failed = func(x *exchange.Exchange, _ exchange.Code) {
				if !x.Replayable() || !x.Reached() {
					t.Error("not replayable, or not reached")
				}
				x.Forward(up)
			}
			up.room = 2
			x := p.Begin(down, post(httpmsg.Unknown), false, nil, 0)
			x.Begin()
			x.RequestData([]byte("abc"), false)
			x.UpstreamClosed(exchange.Closed)
			if n := x.RequestData([]byte("de"), false); n != 0 {
				t.Error("data went past what is kept")
			}
			up.room = 100
			x.UpstreamWritable()
			x.RequestData([]byte("de"), false)
			x.RequestTrailers([]httpmsg.Field{field("a", "b")})
			x.ResponseHead(&httpmsg.Head{Status: 200}, true)
			if x.ReqBytes != 5 {
				t.Errorf("%d bytes", x.ReqBytes)
			}
		}, "resume, resume, head 200 len= end=true", "head POST len= end=false, data ab end=false, data c end=false, data de end=false, trailers"},
		{"trailers too", func(s *script, p *exchange.Pool, down, up *tape) {
			s.request = func(x *exchange.Exchange) { x.KeepForReplay(); x.Forward(&tape{}) }
			s.failed = func(x *exchange.Exchange, _ exchange.Code) { x.Forward(up) }
			x := p.Begin(down, post(httpmsg.Unknown), false, nil, 0)
			x.Begin()
			x.RequestTrailers([]httpmsg.Field{field("a", "b")})
			x.UpstreamClosed(exchange.Closed)
			x.ResponseHead(&httpmsg.Head{Status: 200}, true)
		}, "resume, head 200 len= end=true", "head POST len= end=false, trailers"},
		{"an answer that is not wanted", func(s *script, p *exchange.Pool, down, up *tape) {
			first := &tape{room: 100}
			s.request = func(x *exchange.Exchange) { x.KeepForReplay(); x.Forward(first) }
			s.response = func(x *exchange.Exchange, h *httpmsg.Head) {
				if h.Status == 503 {
					gen := x.Gen
					x.DiscardResponse()
					if x.Gen == gen || x.Status != 0 {
						t.Error("who waits cannot tell")
					}
					x.Park()
				}
			}
			up.room = 100
			x := p.Begin(down, post(2), false, nil, 0)
			x.Begin()
			x.RequestData([]byte("ab"), true)
			x.ResponseHead(&httpmsg.Head{Status: 503}, true)
			if first.said[len(first.said)-1] != "abort cancel" || x.Answered() {
				t.Error(first.said)
			}
			x.Forward(up)
			x.ResponseHead(&httpmsg.Head{Status: 200}, true)
		}, "resume, head 200 len= end=true", "head POST len= end=false, data ab end=true"},
		{"and of which the service then says nothing", func(s *script, p *exchange.Pool, down, up *tape) {
			s.request = func(x *exchange.Exchange) { x.Forward(up) }
			s.response = func(x *exchange.Exchange, h *httpmsg.Head) { x.DiscardResponse() }
			x := p.Begin(down, post(0), true, nil, 0)
			x.Begin()
			x.ResponseHead(&httpmsg.Head{Status: 503, Length: 1}, false)
		}, "head 503 len=0 end=true", "head POST len= end=true, abort cancel"},
		{"a body that is held until it is whole", func(s *script, p *exchange.Pool, down, up *tape) {
			s.request = func(x *exchange.Exchange) { x.HoldBody(10, &holder{f: func(x *exchange.Exchange) { x.Forward(up) }}) }
			up.room = 100
			x := p.Begin(down, post(httpmsg.Unknown), false, nil, 0)
			x.Begin()
			x.RequestData([]byte("abcde"), false)
			x.RequestData([]byte("fghij"), false)
			if string(x.AppendHeld(nil)) != "abcdefghij" || x.HeldBytes() != 10 || x.Attempts != 0 {
				t.Error("not held")
			}
			x.RequestData(nil, true)
			if x.Replayable() {
				t.Error("replayable, and nobody asked for it")
			}
			x.ResponseHead(&httpmsg.Head{Status: 200}, true)
		}, "resume, head 200 len= end=true", "head POST len= end=false, data abcdefghij end=true"},
		{"and one that is longer than the limit", func(s *script, p *exchange.Pool, down, up *tape) {
			s.request = func(x *exchange.Exchange) { x.HoldBody(3, &holder{f: func(x *exchange.Exchange) { x.Forward(up) }}) }
			up.room = 4
			x := p.Begin(down, post(5), false, nil, 0)
			x.Begin()
			if n := x.RequestData([]byte("abcde"), true); n != 4 {
				t.Errorf("took %d", n)
			}
			up.room = 4
			x.UpstreamWritable()
			x.RequestData([]byte("e"), true)
			x.ResponseHead(&httpmsg.Head{Status: 200}, true)
		}, "resume, resume, head 200 len= end=true", "head POST len= end=false, data abc end=false, data d end=false, data e end=true"},
		{"and one that is refused for it", func(s *script, p *exchange.Pool, down, up *tape) {
			s.request = func(x *exchange.Exchange) {
				x.HoldBody(3, &holder{f: func(x *exchange.Exchange) { x.Reply(&httpmsg.Head{Status: 413}, nil) }})
			}
			x := p.Begin(down, post(5), false, nil, 0)
			x.Begin()
			if n := x.RequestData([]byte("abcde"), true); n != 5 {
				t.Errorf("took %d", n)
			}
		}, "resume, head 413 len=0 end=true, abort no-error", ""},
		{"a body that is held, with trailers, and sent again", func(s *script, p *exchange.Pool, down, up *tape) {
			s.request = func(x *exchange.Exchange) {
				x.KeepForReplay()
				x.HoldBody(10, &holder{f: func(x *exchange.Exchange) { x.Forward(&tape{room: 1}) }})
			}
			s.failed = func(x *exchange.Exchange, _ exchange.Code) { x.Forward(up) }
			up.room = 10
			x := p.Begin(down, post(httpmsg.Unknown), false, nil, 0)
			x.Begin()
			x.RequestData([]byte("abc"), false)
			x.RequestTrailers([]httpmsg.Field{field("a", "b")})
			x.UpstreamClosed(exchange.Refused)
			x.ResponseHead(&httpmsg.Head{Status: 200}, true)
		}, "resume, head 200 len= end=true", "head POST len= end=false, data abc end=false, trailers"},
		{"an answer that breaks off where its end has a status", func(s *script, p *exchange.Pool, down, up *tape) {
			s.request = func(x *exchange.Exchange) { x.Forward(up) }
			s.response = func(x *exchange.Exchange, h *httpmsg.Head) {
				x.AbortTrailers = []httpmsg.Field{field("grpc-status", "14")}
			}
			down.room = 10
			x := p.Begin(down, post(httpmsg.Unknown), false, nil, 0)
			x.Begin()
			x.ResponseHead(ok, false)
			x.ResponseData([]byte("ab"), false)
			x.UpstreamClosed(exchange.Closed)
			if x.Ended != exchange.Server || x.Code != exchange.Closed {
				t.Error(x.Ended, x.Code)
			}
		}, "resume, head 200 len= end=false, data ab end=false, trailers, abort no-error", "head POST len= end=false"},
		{"and one that is ended for it", func(s *script, p *exchange.Pool, down, up *tape) {
			s.request = func(x *exchange.Exchange) { x.Forward(up) }
			s.response = func(x *exchange.Exchange, h *httpmsg.Head) {
				x.AbortTrailers = []httpmsg.Field{field("grpc-status", "14")}
			}
			down.room = 10
			x := p.Begin(down, post(0), true, nil, 0)
			x.Begin()
			x.ResponseHead(ok, false)
			x.Abort(exchange.Timeout)
			if x.Ended != exchange.Proxy || x.Code != exchange.Timeout {
				t.Error(x.Ended, x.Code)
			}
		}, "head 200 len= end=false, trailers", "head POST len= end=true, abort cancel"},
		{"and one that ends without it", func(s *script, p *exchange.Pool, down, up *tape) {
			s.request = func(x *exchange.Exchange) { x.Forward(up) }
			s.response = func(x *exchange.Exchange, h *httpmsg.Head) {
				x.AbortTrailers = []httpmsg.Field{field("grpc-status", "14")}
			}
			down.room = 10
			x := p.Begin(down, post(0), true, nil, 0)
			x.Begin()
			x.ResponseHead(ok, false)
			x.ResponseData([]byte("ab"), true)
		}, "head 200 len= end=false, data ab end=false, trailers", "head POST len= end=true"},
		{"a local answer that has no room", func(s *script, p *exchange.Pool, down, up *tape) {
			s.request = func(x *exchange.Exchange) { x.Reply(&httpmsg.Head{Status: 421}, []byte("misdirected")) }
			down.room = 3
			x := p.Begin(down, post(0), true, nil, 0)
			x.Begin()
			if x.Over() {
				t.Error("over too early")
			}
			down.room = 100
			x.DownstreamWritable()
		}, "head 421 len=11 end=false, data mis end=false, data directed end=true", ""},
		{"and whose client goes meanwhile", func(s *script, p *exchange.Pool, down, up *tape) {
			s.request = func(x *exchange.Exchange) { x.Reply(&httpmsg.Head{Status: 421}, []byte("misdirected")) }
			x := p.Begin(down, post(0), true, nil, 0)
			x.Begin()
			x.DownstreamClosed(exchange.Cancel)
			x.DownstreamWritable()
		}, "head 421 len=11 end=false, data  end=false", ""},
		{"204 has neither body nor length", func(s *script, p *exchange.Pool, down, up *tape) {
			s.request = func(x *exchange.Exchange) {
				x.Reply(&httpmsg.Head{Status: 204, Fields: []httpmsg.Field{field("content-length", "1")}}, []byte("x"))
			}
			p.Begin(down, post(0), true, nil, 0).Begin()
		}, "head 204 len= end=true", ""},
		{"an answer to HEAD says how long it would be", func(s *script, p *exchange.Pool, down, up *tape) {
			s.request = func(x *exchange.Exchange) { x.Reply(&httpmsg.Head{Status: 404}, []byte("gone")) }
			h := post(0)
			h.Method = []byte("HEAD")
			p.Begin(down, h, true, nil, 0).Begin()
		}, "head 404 len=4 end=true", ""},
		{"an early answer ends both ways without an error", func(s *script, p *exchange.Pool, down, up *tape) {
			s.request = func(x *exchange.Exchange) { x.Forward(up) }
			up.room = 1
			x := p.Begin(down, post(9), false, nil, 0)
			x.Begin()
			x.RequestData([]byte("abc"), false)
			x.ResponseHead(&httpmsg.Head{Status: 413}, true)
			x.RequestData([]byte("def"), false)
		}, "resume, head 413 len= end=true, abort no-error", "head POST len= end=false, data a end=false, abort no-error"},
		{"an answer that breaks off breaks off", func(s *script, p *exchange.Pool, down, up *tape) {
			s.request = func(x *exchange.Exchange) { x.Forward(up) }
			down.room = 10
			x := p.Begin(down, post(0), true, nil, 0)
			x.Begin()
			x.ResponseHead(ok, false)
			x.ResponseData([]byte("ab"), false)
			x.UpstreamClosed(exchange.Closed)
		}, "head 200 len= end=false, data ab end=false, abort closed", "head POST len= end=true"},
		{"the service answers in place of the server", func(s *script, p *exchange.Pool, down, up *tape) {
			s.request = func(x *exchange.Exchange) { x.Forward(up) }
			s.response = func(x *exchange.Exchange, h *httpmsg.Head) { x.Reply(&httpmsg.Head{Status: 502}, []byte("no")) }
			x := p.Begin(down, post(0), true, nil, 0)
			x.Begin()
			x.ResponseHead(ok, false)
			down.room = 10
			x.DownstreamWritable()
			x.ResponseData([]byte("ab"), false)
		}, "head 502 len=2 end=false, data  end=false, data no end=true", "head POST len= end=true, abort cancel"},
		{"1xx to an HTTP/1.0 client", func(s *script, p *exchange.Pool, down, up *tape) {
			s.request = func(x *exchange.Exchange) { x.Forward(up) }
			h := post(0)
			h.Minor = 0
			x := p.Begin(down, h, true, nil, 0)
			x.Begin()
			x.ResponseHead(&httpmsg.Head{Status: 103}, false)
			x.ResponseHead(&httpmsg.Head{Status: 200}, true)
		}, "head 200 len= end=true", "head POST len= end=true"},
		{"the driver's time limit", func(s *script, p *exchange.Pool, down, up *tape) {
			s.request = func(x *exchange.Exchange) { x.Forward(up) }
			x := p.Begin(down, post(0), true, nil, 0)
			x.Begin()
			x.Abort(exchange.Timeout)
			x.Abort(exchange.Timeout)
		}, "abort timeout", "head POST len= end=true, abort cancel"},
		{"a connection that comes after the client went", func(s *script, p *exchange.Pool, down, up *tape) {
			s.request = func(x *exchange.Exchange) {}
			x := p.Begin(down, post(0), true, nil, 0)
			x.Begin()
			x.DownstreamClosed(exchange.Cancel)
			x.Forward(up)
		}, "", "abort cancel"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := &script{}
			down, up := &tape{}, &tape{}
			tt.play(s, &exchange.Pool{Service: s}, down, up)
			if got := strings.Join(down.said, ", "); got != tt.down {
				t.Errorf("down: %s\nwant: %s", got, tt.down)
			}
			if got := strings.Join(up.said, ", "); got != tt.up {
				t.Errorf("up: %s\nwant: %s", got, tt.up)
			}
			waits := strings.HasPrefix(tt.name, "an empty") || strings.HasPrefix(tt.name, "the same")
			if want := map[bool]int{true: 0, false: 1}[waits]; s.done != want {
				t.Errorf("done %d times", s.done)
			}
		})
	}
}

// TestInterimHeadsAreBounded: they are queued whether the client reads or not.
func TestInterimHeadsAreBounded(t *testing.T) {
	up, down := &tape{}, &tape{}
	s := &script{request: func(x *exchange.Exchange) { x.Forward(up) }}
	p := &exchange.Pool{Service: s}
	x := p.Begin(down, post(0), true, nil, 0)
	x.Begin()
	for i := 0; i < 1000 && !x.Over(); i++ {
		x.ResponseHead(&httpmsg.Head{Status: 103}, false)
	}
	if len(down.said) > 70 || s.done != 1 || x.Status != 503 || !slices.Contains(up.said, "abort protocol") {
		t.Errorf("%d heads, done %d, status %d, up %v", len(down.said), s.done, x.Status, up.said)
	}
}

// TestReuse: nothing of one request is left for the next, and who kept a pointer can tell.
func TestReuse(t *testing.T) {
	s := &script{request: func(x *exchange.Exchange) { x.Reply(&httpmsg.Head{Status: 200}, nil) }}
	p := &exchange.Pool{Service: s}
	h := post(0)
	h.Add([]byte("a"), []byte("b"))
	h.Upgrade = []byte("x")
	x := p.Begin(&tape{}, h, true, "conn", 5)
	x.Begin()
	gen := x.Gen
	x.User = "kept"
	x.Cause = fmt.Errorf("cause")
	p.Release(x)
	if x.Gen == gen {
		t.Error("a waiter cannot tell that its request is gone")
	}
	y := p.Begin(&tape{}, post(0), true, nil, 0)
	if y != x {
		t.Fatal("not reused")
	}
	if y.User != "kept" || y.Conn != nil || y.Cause != nil || y.Status != 0 || y.Over() || y.Answered() || len(y.Req.Fields) != 0 || y.Req.Upgrade != nil || y.Attempts != 0 || y.Local() {
		t.Errorf("%+v", y)
	}
}

// quiet is a stream that remembers nothing, so that the exchange's own allocations show.
type quiet struct{}

func (quiet) WriteHead(*httpmsg.Head, bool)                  {}
func (quiet) WriteData(p []byte, _ bool) int                 { return len(p) }
func (quiet) WriteTrailers(f []httpmsg.Field)                {}
func (quiet) Resume()                                        {}
func (quiet) Abort(exchange.Code)                            {}
func (quiet) Request(x *exchange.Exchange)                   { x.Forward(quiet{}) }
func (quiet) Done(*exchange.Exchange)                        {}
func (quiet) Failed(*exchange.Exchange, exchange.Code)       {}
func (quiet) Response(_ *exchange.Exchange, h *httpmsg.Head) {}

func TestNoAllocations(t *testing.T) {
	p := &exchange.Pool{Service: quiet{}}
	req := post(3)
	for i := range 10 {
		req.Add([]byte("name"), []byte(fmt.Sprint("value ", i)))
	}
	res := &httpmsg.Head{Status: 200, Length: 3}
	body := []byte("abc")
	if n := testing.AllocsPerRun(1000, func() {
		x := p.Begin(quiet{}, req, false, nil, 1)
		x.Begin()
		x.RequestData(body, true)
		x.ResponseHead(res, false)
		x.ResponseData(body, true)
		if !x.Over() {
			t.Fatal("not over")
		}
		p.Release(x)
	}); n != 0 {
		t.Errorf("%v allocations an exchange, want 0", n)
	}
}
