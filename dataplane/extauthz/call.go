package extauthz

import (
	"context"
	"strconv"

	"aether/dataplane/authz"
	"aether/dataplane/decide"
	"aether/dataplane/exchange"
	"aether/dataplane/httpmsg"
	"aether/dataplane/snapshot"
)

// Loop is what a Call needs of the loop that its request is on.
type Loop interface {
	Post(f func()) error
	Go(f func())
}

// Asker is who asks. Exactly one of the methods is called, on the loop, perhaps
// before Ask returns; none if the exchange ends first or the Call is cancelled.
type Asker interface {
	// Allowed: everybody said yes, and what they want changed of the request is
	// changed. The exchange is still parked.
	Allowed(x *exchange.Exchange)
	// Refused: the request is to be answered with r.
	Refused(x *exchange.Exchange, r *Refusal)
}

// Causes of refusals, for the journal: a closed set.
const (
	CauseDenied      = "ext-authz-denied"
	CauseUnavailable = "ext-authz-unavailable"
	CauseOverload    = "overload"
)

// Refusal is what a request is answered with that may not go on.
type Refusal struct {
	Cause  string
	Status int
	Body   []byte
	Fields []snapshot.Op // of a denial: done to the answer's fields
}

// Nobody is the refusal where there is no authorization service at all.
var Nobody = &Refusal{Cause: CauseUnavailable, Status: 403,
	Body: []byte("ext-authz-unavailable: a filter asks the authorization service about this request, and this proxy has none; nothing passes unasked\n")}

// Reply answers x with the refusal: a gRPC request (grpc) as gRPC has it, by trailers
// only. last changes the answer after the authorization service's fields are in it, which so do not stand against
// what only the proxy says.
func (r *Refusal) Reply(x *exchange.Exchange, grpc bool, last func(h *httpmsg.Head)) {
	h := httpmsg.Head{Status: r.Status, Fields: make([]httpmsg.Field, 0, 8)}
	snapshot.Apply(r.Fields, &h)
	last(&h)
	if !grpc {
		if _, ok := h.Get("content-type"); !ok && len(r.Body) > 0 {
			h.Add([]byte("content-type"), []byte("text/plain; charset=utf-8"))
		}
		x.Reply(&h, r.Body)
		return
	}
	h.Status = 200
	h.Set([]byte("content-type"), []byte(httpmsg.GRPC))
	h.Set([]byte("grpc-status"), strconv.AppendInt(nil, int64(httpmsg.GRPCStatus(r.Status)), 10))
	h.Set([]byte("grpc-message"), httpmsg.GRPCMessage(string(r.Body)))
	x.LoggedStatus = r.Status
	x.Reply(&h, nil)
}

// Call is one request that waits for an answer. It belongs to the request's loop.
type Call struct {
	Response []snapshot.Op // to be done to the answer's fields, once everybody has said yes

	s      *Service
	l      Loop
	x      *exchange.Exchange
	gen    uint32
	to     Asker
	pod    string
	q      authz.Question
	second []byte // the path's other spelling; nil: there is none
	other  bool   // it is this that is asked about
	cancel context.CancelFunc
	over   bool
}

// Ask parks x until first and what follows it have been asked about it. q is what is
// asked, but for Authz, Path and the body; second the other spelling of its path, if
// there is one (decide.Verdict.AuthzPath). The body is held as far as a question takes
// it, unless no filter of the chain wants it or the request asks for a tunnel, which has none.
func (s *Service) Ask(l Loop, x *exchange.Exchange, first *snapshot.Authz, q authz.Question, second []byte, to Asker) *Call {
	c := &Call{s: s, l: l, x: x, gen: x.Gen, to: to, q: q, second: second}
	c.q.Authz = first
	c.q.MaxBody = authz.MaxBody
	c.q.Whole = true
	if q.Workload == nil { // the pod has left while its connection lives
		c.refuse(CauseUnavailable, 403, "ext-authz-unavailable: the pod is not known any more, and nothing can be asked on its behalf; nothing passes unasked\n", failed)
		return c
	}
	c.pod = q.Workload.ContainerID
	wanted := false
	for a := first; a != nil; a = a.Next {
		wanted = wanted || !a.NoBody
	}
	if wanted && x.Req.Upgrade == nil {
		x.HoldBody(authz.MaxBody, c)
	} else {
		c.q.Whole = x.Req.Length == 0
		c.next()
	}
	return c
}

// Cancel ends the call: nobody waits for it any more. c may be nil.
func (c *Call) Cancel() {
	if c == nil || c.over {
		return
	}
	c.over = true
	if c.cancel != nil {
		c.cancel()
		c.s.Asked[cancelled].Inc()
	}
}

// Edit does to the answer's fields what was asked for. c may be nil.
func (c *Call) Edit(h *httpmsg.Head) {
	if c != nil {
		snapshot.Apply(c.Response, h)
	}
}

// Held is exchange.Holder.
func (c *Call) Held(x *exchange.Exchange, why exchange.Held) {
	if why == exchange.HeldNoRoom {
		c.overload("no memory is left to hold its body for the authorization service")
		return
	}
	c.q.Body, c.q.Whole = x.AppendHeld(nil), why == exchange.HeldWhole
	c.next()
}

// next asks the question whose turn it is.
func (c *Call) next() {
	c.q.Path = nil
	if c.other {
		c.q.Path = c.second
	}
	question := authz.Append(nil, &c.q)
	if question == nil {
		c.refuse(CauseUnavailable, 403, "ext-authz-unavailable: the request has more than "+strconv.Itoa(authz.MaxFields)+" fields, and the authorization service is not asked about a part of it\n", failed)
		return
	}
	if !c.s.enter(c.pod) {
		c.overload("as many requests wait for the authorization service as may")
		return
	}
	ctx, cancel := context.WithCancel(context.Background())
	c.cancel = cancel
	filter := c.q.Authz.Name
	c.l.Go(func() {
		a, err := c.s.ask(ctx, question)
		if ctx.Err() == nil {
			c.s.tell(filter, &a, err)
		}
		cancel()
		c.s.leave(c.pod)
		_ = c.l.Post(func() { c.answered(a, err) }) // a loop that has ended has ended the exchange
	})
}

// answered is back on the loop.
func (c *Call) answered(a authz.Answer, err error) {
	if c.over || c.x.Gen != c.gen || c.x.Over() {
		return
	}
	c.cancel = nil
	told := false
	defer func() {
		if !told { // a panic: nobody else ends what the client waits for
			c.over = true
			c.x.Abort(exchange.Internal)
		}
	}()
	c.act(a, err)
	told = true
}

// act does what an answer says.
func (c *Call) act(a authz.Answer, err error) {
	switch {
	case err != nil:
		result, text := why(err)
		c.refuse(CauseUnavailable, 403, "ext-authz-unavailable: "+c.q.Authz.Name+" asks the authorization service about this request, and "+text+"; nothing passes unasked\n", result)
		return
	case !a.Allowed:
		c.settled(denied)
		r := &Refusal{Cause: CauseDenied, Status: a.Status, Body: a.Body, Fields: a.Response}
		if r.Status == 0 {
			r.Status = 403
		}
		c.to.Refused(c.x, r)
		return
	}
	if !c.other { // of the other spelling the answer alone counts: its changes are these again
		snapshot.Apply(a.Request, &c.x.Req)
		if len(a.Query) > 0 {
			path, ok := decide.EditQuery(a.Query, c.x.Req.Path)
			if ok && c.second != nil {
				c.second, ok = decide.EditQuery(a.Query, c.second)
			}
			if !ok {
				c.refuse(CauseUnavailable, 403, "ext-authz-unavailable: the authorization service changes the query, which has more parameters than are looked at\n", failed)
				return
			}
			c.x.Req.Path = path
		}
		c.Response = append(c.Response, a.Response...)
	}
	switch {
	case c.second != nil && !c.other:
		c.other = true
	case c.q.Authz.Next != nil:
		c.q.Authz, c.other = c.q.Authz.Next, false
	default:
		c.settled(allowed)
		c.to.Allowed(c.x)
		return
	}
	c.s.Asked[allowed].Inc()
	c.next()
}

// settled ends the call with a result. What is kept of it from then on is Response.
func (c *Call) settled(result int) {
	c.over = true
	c.q, c.second = authz.Question{}, nil
	c.s.Asked[result].Inc()
}

func (c *Call) refuse(cause string, status int, text string, result int) {
	c.settled(result)
	c.to.Refused(c.x, &Refusal{Cause: cause, Status: status, Body: []byte(text)})
}

func (c *Call) overload(text string) {
	c.refuse(CauseOverload, 503, "overload: "+text+"; try again\n", overflow)
}
