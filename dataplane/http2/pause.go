package http2

// Pause makes the running Feed return after the frame whose event is being raised,
// however many follow it: for a driver that has done enough for now. The rest is
// given again as any other. To be called by the Handler.
func (c *Conn) Pause() { c.paused = true }

// Paused reports whether the last Feed stopped because of Pause.
func (c *Conn) Paused() bool { return c.paused }
