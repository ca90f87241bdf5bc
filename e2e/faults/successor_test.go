package faults

// replaced: the proxy that takes another one's place leads the pods of its node: those that
// were there end as they are told to, and new ones are registered.
func replaced(w *world) {
	old := w.cart("cart-5", 1)
	w.must(w.AwaitRows(w.ctx, old, "HEALTHY"))
	l := w.begin()
	l.more(rps)
	w.must(w.ReplaceProxy(w.ctx, 1))
	w.step()
	for _, name := range []string{"cart-2", "cart-5"} {
		w.must(w.AwaitRows(w.ctx, w.Pod(name), "HEALTHY"))
	}
	w.must(w.Terminate("cart-5"))
	w.must(w.AwaitRows(w.ctx, old, "UNHEALTHY")) // two seconds after DRAINING
	w.must(w.AwaitUsable(w.ctx, 0, old, false))
	anew := w.cart("cart-6", 1)
	w.must(w.AwaitRows(w.ctx, anew, "HEALTHY"))
	l.until("an answer of the new pod", func() bool { return l.from["cart-6"] > 0 })
	w.must(w.AwaitRows(w.ctx, old, "UNHEALTHY"))
	w.must(w.RemovePod("cart-5"))
	w.must(w.AwaitRows(w.ctx, old, ""))
	l.check("replaced")
}
