"""`user_sim`: a booking desk whose customer says what they want over several turns."""
